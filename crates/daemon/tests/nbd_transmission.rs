//! NBD's transmission phase over real sockets, workers, engines and disks.

mod support;

use fathom_core::{Disk, WorkerHandle};
use fathom_exports::nbd::connection::{Ending, Limits};
use fathom_exports::nbd::wire::{Replies, command, command_flag};
use fathom_storage::{EngineKind, MemoryDisk};
use std::io::Write;
use std::sync::Arc;
use support::client::Client;
use support::{CONTEXT, Served, Setup, worker};

const ALL: [Replies; 3] = [Replies::Simple, Replies::Structured, Replies::Extended];

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;

fn memory() -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(SIZE).expect("a disk"))
}

/// With each engine, and each kind of replies.
fn each(test: impl Fn(Served<'_>, Client)) {
    for kind in EngineKind::ALL {
        let disk = memory();
        let worker = worker(&disk, kind);
        for replies in ALL {
            println!("{kind} {replies:?}");
            let (served, client) = Setup::with(replies).serve(&disk, &worker);
            test(served, client);
        }
    }
}

/// Bytes that differ everywhere.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn what_is_written_is_read() {
    each(|served, mut client| {
        for (seed, len) in [512, 4096, 16384, 16896, 65536, 262144, 262656, 3 << 20, 32 << 20]
            .into_iter()
            .enumerate()
        {
            let offset = seed as u64 * 512 + 1024;
            let data = pattern(seed as u64, len);
            assert_eq!(client.write(offset, &data).error, 0);
            assert!(client.read(offset, len) == data, "{len}");
            let (half, rest) = (len as u64 / 1024 * 512, len / 1024 * 512);
            assert!(client.read(offset + half, len - rest) == data[rest..]);
        }
        client.disconnect();
        assert_eq!(served.end(), Ending::Disconnected);
    });
}
