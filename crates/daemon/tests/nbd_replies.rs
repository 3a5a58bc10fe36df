//! When replies of NBD's transmission phase are sent: after all of a refused command, and to every
//! command of a client that has more data outstanding than the server has memory.

mod support;

use fathom_core::Disk;
use fathom_exports::nbd::connection::Ending;
use fathom_nbd::protocol::{Replies, command, command_flag};
use fathom_storage::{ByteDisk, EngineKind, MemoryDisk};
use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use support::client::Client;
use support::{Setup, pattern, worker};

const ALL: [Replies; 3] = [Replies::Simple, Replies::Structured, Replies::Extended];

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;

fn memory() -> Arc<dyn Disk> {
    let disk = MemoryDisk::new(SIZE).expect("a disk");
    Arc::new(ByteDisk::new(Arc::new(disk)))
}

/// The connection is in order.
fn still_works(client: &mut Client) {
    let data = pattern(99, 4096);
    assert_eq!(client.write(8192, &data).error, 0);
    assert_eq!(client.read(8192, 4096), data);
}

/// Sends a write without its last byte. The server has time to receive these bytes, and must not
/// have replied.
fn send_incomplete(
    client: &mut Client,
    other: &mut Client,
    flags: u16,
    offset: u64,
    len: usize,
) -> u64 {
    let (cookie, mut bytes) = client.header(command::WRITE, flags, offset, len as u64);
    bytes.resize(bytes.len() + len - 1, 0xee);
    client.stream.write_all(&bytes).expect("sent");
    for _ in 0..50 {
        still_works(other);
    }
    client.stream.set_nonblocking(true).expect("set");
    let early = client.stream.read(&mut [0; 64]);
    client.stream.set_nonblocking(false).expect("set");
    let early = early.map_err(|error| error.kind());
    assert_eq!(early, Err(ErrorKind::WouldBlock), "{flags} {offset} {len}");
    cookie
}

#[test]
fn error_reply_of_a_refused_write_follows_its_payload() {
    for kind in EngineKind::ALL {
        let disk = memory();
        let worker = worker(&disk, kind);
        for replies in ALL {
            for (read_only, flags, offset, len, error) in [
                (true, 0, 0, 512, 1),
                (true, 0, 0, 1 << 20, 1),
                (false, 0, SIZE, 4096, 28),
                (false, 0, SIZE - 512, 1 << 20, 28),
                (false, command_flag::DF, 0, 70_000, 22),
                (false, 0, 0, 33 << 20, 22),
            ] {
                let setup = Setup {
                    read_only,
                    ..Setup::with(replies)
                };
                let (_served, mut client) = setup.serve(&disk, &worker);
                let (_other, mut other) = Setup::with(replies).serve(&disk, &worker);
                let cookie = send_incomplete(&mut client, &mut other, flags, offset, len);
                client.stream.write_all(&[0xee]).expect("sent");
                assert_eq!(
                    client.reply_to(cookie).error,
                    error,
                    "{kind} {replies:?} {len}"
                );
                assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, 0);
            }
        }
    }
}

#[test]
fn write_without_its_whole_payload_is_not_answered_at_the_end() {
    for kind in EngineKind::ALL {
        let disk = memory();
        let worker = worker(&disk, kind);
        for replies in ALL {
            for (offset, len) in [(0, 70_000), (0, 3 << 20), (SIZE, 70_000)] {
                let (served, mut client) = Setup::with(replies).serve(&disk, &worker);
                let (_other, mut other) = Setup::with(replies).serve(&disk, &worker);
                send_incomplete(&mut client, &mut other, 0, offset, len);
                assert_eq!(served.detach(), Ending::Detached);
                client.expect_end();
            }
        }
    }
}

/// A refused write, and one that is not, of which a part is received before the connection goes to
/// another source.
#[test]
fn error_reply_of_a_refused_write_survives_a_handover() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in ALL {
        for (offset, error) in [(SIZE, 28), (MIB, 0)] {
            let (served, mut client) = Setup::with(replies).serve(&disk, &worker);
            let (_other, mut other) = Setup::with(replies).serve(&disk, &worker);
            let cookie = send_incomplete(&mut client, &mut other, 0, offset, 1 << 20);
            let _served = served.hand_over();
            client.stream.write_all(&[0xee]).expect("sent");
            assert_eq!(client.reply_to(cookie).error, error, "{replies:?}");
            still_works(&mut client);
        }
    }
}

#[test]
fn large_reads_are_answered_with_little_memory() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in ALL {
        // (Reads that may be answered in chunks are among them, where the form of replies allows
        // that.)
        for (count, len) in [
            (65, 1 << 20),
            (128, 1 << 20),
            (4, 32 << 20),
            (128, 300 << 10),
        ] {
            println!("{replies:?} {count} {len}");
            let (_served, mut client) = Setup::with(replies).serve(&disk, &worker);
            let flag = |n: usize| match replies {
                Replies::Structured | Replies::Extended if !n.is_multiple_of(5) => command_flag::DF,
                _ => 0,
            };
            let cookies: HashSet<u64> = (0..count)
                .map(|n| client.send(command::READ, flag(n), n as u64 * 4096, len))
                .collect();
            let mut answered = HashSet::new();
            for _ in 0..count {
                let (cookie, reply) = client.reply();
                let bytes: usize = reply.data.iter().map(|(_, data)| data.len()).sum();
                assert_eq!((reply.error, bytes as u64), (0, len));
                answered.insert(cookie);
            }
            assert_eq!(answered, cookies);
        }
    }
}

#[test]
fn reads_in_one_piece_are_all_answered_after_a_handover() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    let (served, mut client) = Setup::with(Replies::Simple).serve(&disk, &worker);
    let cookies: Vec<u64> = (0..128)
        .map(|n| client.send(command::READ, 0, n * 4096, MIB))
        .collect();
    let mut served = served;
    for n in 0..cookies.len() {
        if n % 20 == 10 {
            served = served.hand_over();
        }
        let (cookie, reply) = client.reply();
        assert!(cookies.contains(&cookie) && reply.error == 0);
    }
    client.disconnect();
    assert_eq!(served.end(), Ending::Disconnected);
}
