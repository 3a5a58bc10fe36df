//! NBD's transmission phase over real sockets, workers, engines and disks.

mod support;

use fathom_core::{Disk, Op};
use fathom_exports::nbd::connection::Ending;
use fathom_nbd::protocol::{Replies, RequestHeader, command, command_flag};
use fathom_storage::{ByteDisk, Cache, EngineKind, FileDisk, FileOptions, MemoryDisk};
use proptest::prelude::*;
use std::io::Write;
use std::sync::Arc;
use support::client::{Client, Reply};
use support::disks::{FailingDisk, NotingDisk};
use support::{CONTEXT, Served, Setup, pattern, worker};

const ALL: [Replies; 3] = [Replies::Simple, Replies::Structured, Replies::Extended];

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;

fn memory() -> Arc<dyn Disk> {
    Arc::new(ByteDisk::new(Arc::new(
        MemoryDisk::new(SIZE).expect("a disk"),
    )))
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

#[test]
fn what_is_written_is_read() {
    each(|served, mut client| {
        for (seed, len) in [
            512,
            4096,
            16384,
            16896,
            65536,
            262144,
            262656,
            1_000_001,
            3 << 20,
            32 << 20,
        ]
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

/// Checks that the connection still writes and reads data.
fn still_works(client: &mut Client) {
    let data = pattern(99, 4096);
    assert_eq!(client.write(8192, &data).error, 0);
    assert_eq!(client.read(8192, 4096), data);
}

#[test]
fn every_command_does_what_it_says() {
    const FUA: u16 = command_flag::FUA;
    each(|_served, mut client| {
        let ok = |reply: Reply| assert_eq!((reply.error, reply.data.len()), (0, 0), "{reply:?}");
        let data = pattern(1, 3 * MIB as usize);
        assert_eq!(client.write(0, &data).error, 0);
        ok(client.call(command::FLUSH, 0, 0, 0));
        ok(client.call(command::FLUSH, FUA, 0, 0));
        ok(client.call(command::TRIM, 0, 0, MIB));
        assert!(client.read(0, 4096).iter().all(|b| *b == 0), "memory");
        let no_hole = command_flag::NO_HOLE | FUA;
        ok(client.call(command::WRITE_ZEROES, no_hole, MIB, MIB));
        ok(client.call(command::WRITE_ZEROES, 0, 2 * MIB, 512));
        let fast = client.call(command::WRITE_ZEROES, command_flag::FAST_ZERO, 0, 512);
        assert_eq!(fast.error, 95, "not offered, and never done slowly");
        assert!(client.read(MIB, MIB as usize).iter().all(|b| *b == 0));
        assert!(client.read(2 * MIB, 512).iter().all(|b| *b == 0));
        let rest = &data[2 * MIB as usize + 512..];
        assert!(client.read(2 * MIB + 512, rest.len()) == rest);
        ok(client.call(command::CACHE, 0, 512, 5 * MIB));
        // Commands of length 0 succeed and change no data.
        for command in [command::TRIM, command::WRITE_ZEROES, command::CACHE] {
            ok(client.call(command, 0, 512, 0));
        }
        assert_eq!(client.write(SIZE, &[]).error, 0);
        assert!(client.call(command::READ, 0, 0, 0).bytes(0, 0).is_empty());
        client.disconnect();
    });
}

#[test]
fn fua_and_no_hole_reach_the_disk() {
    use command_flag::{FUA, NO_HOLE};
    for write_cache in [true, false] {
        let noting = NotingDisk::new(write_cache);
        let disk: Arc<dyn Disk> = noting.clone();
        let worker = worker(&disk, EngineKind::IoUring);
        for replies in ALL {
            let (_served, mut client) = Setup::with(replies).serve(&disk, &worker);
            for flags in [0, FUA] {
                let durable = flags == FUA || !write_cache;
                // The small payload is used where it was received, and the large payload is split
                // into pieces.
                for len in [512, 1 << 20] {
                    let cookie = client.send_write(flags, 0, &vec![1; len]);
                    assert_eq!(client.reply_to(cookie).error, 0);
                    let pieces = len.div_ceil(256 << 10);
                    assert_eq!(noting.take(), vec![(Op::Write, durable, false); pieces]);
                }
                for (command, more, op, unmap) in [
                    (command::TRIM, 0, Op::Discard, true),
                    (command::WRITE_ZEROES, 0, Op::WriteZeroes, true),
                    (command::WRITE_ZEROES, NO_HOLE, Op::WriteZeroes, false),
                ] {
                    assert_eq!(client.call(command, flags | more, 0, 4096).error, 0);
                    assert_eq!(noting.take(), [(op, durable, unmap)]);
                }
            }
        }
    }
}

#[test]
fn the_status_of_blocks_is_told() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in [Replies::Structured, Replies::Extended] {
        let (_served, mut client) = Setup::with(replies).serve(&disk, &worker);
        assert_eq!(client.write(4096, &[1; 8192]).error, 0);
        let mut status = |flags, offset, len| {
            let reply = client.call(command::BLOCK_STATUS, flags, offset, len);
            assert_eq!((reply.error, reply.extents.len()), (0, 1), "{reply:?}");
            assert_eq!(reply.extents[0].0, CONTEXT);
            reply.extents[0].1.clone()
        };
        let all = [(4096, 3), (8192, 0), (SIZE - 12288, 3)];
        assert_eq!(status(0, 0, SIZE), all);
        assert_eq!(status(command_flag::REQ_ONE, 0, SIZE), all[..1]);
        assert_eq!(status(0, 512, 4096), [(3584, 3), (512, 0)]);
        assert_eq!(status(command_flag::REQ_ONE, 8192, 512), [(512, 0)]);
        let refused = client.call(command::BLOCK_STATUS, 0, SIZE, 512);
        assert_eq!(refused.error, 22);
        assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 0).error, 22);
    }
}

#[test]
fn a_block_status_can_be_filtered() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    let (_served, mut client) = Setup::with(Replies::Extended).serve(&disk, &worker);
    let mut filtered = |ids: &[u32], len: u64| {
        let mut payload = len.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend(id.to_be_bytes()));
        let flag = command_flag::PAYLOAD_LEN;
        let (cookie, mut bytes) =
            client.header(command::BLOCK_STATUS, flag, 0, payload.len() as u64);
        bytes.extend(payload);
        client.stream.write_all(&bytes).expect("sent");
        client.reply_to(cookie)
    };
    assert_eq!(
        filtered(&[CONTEXT], SIZE).extents,
        [(CONTEXT, vec![(SIZE, 3)])]
    );
    for (ids, len) in [
        (&[][..], 4096),
        (&[CONTEXT + 1], 4096),
        (&[CONTEXT, CONTEXT], 4096),
        (&[CONTEXT], SIZE + 512),
        (&[CONTEXT], 0),
        (&[0; 100], 4096),
    ] {
        assert_eq!(filtered(ids, len).error, 22, "{ids:?} {len}");
    }
    still_works(&mut client);
}

#[test]
fn what_is_wrong_is_refused_and_the_connection_goes_on() {
    use command::*;
    const INVALID: u32 = 22;
    const NO_SPACE: u32 = 28;
    const DF: u16 = command_flag::DF;
    each(|_served, mut client| {
        let structured = client.replies != Replies::Simple;
        for (command, flags, offset, len, error) in [
            (READ, 0, SIZE, 512, INVALID),
            (READ, 0, u64::MAX - 511, 512, INVALID),
            (READ, 0, u64::MAX - 511, 1024, INVALID),
            (READ, 0, SIZE - 1, 2, INVALID),
            (READ, command_flag::NO_HOLE, 0, 512, INVALID),
            (READ, DF, 0, 33 * MIB, if structured { 75 } else { INVALID }),
            (READ, 1 << 15, 0, 512, INVALID),
            (TRIM, 0, SIZE - 512, 1024, INVALID),
            (TRIM, DF, 0, 512, INVALID),
            (CACHE, 0, SIZE, 512, INVALID),
            (CACHE, command_flag::NO_HOLE, 0, 512, INVALID),
            (WRITE_ZEROES, 0, SIZE, 512, NO_SPACE),
            (WRITE_ZEROES, DF, 0, 512, INVALID),
            (FLUSH, 0, 0, 512, INVALID),
            (FLUSH, 0, 512, 0, INVALID),
            (FLUSH, DF, 0, 0, INVALID),
            (8, 0, 0, 512, INVALID),
            (0xffff, 0, 0, 512, INVALID),
        ] {
            let reply = client.call(command, flags, offset, len);
            assert_eq!(reply.error, error, "{command} {flags} {offset} {len}");
            assert_eq!(reply.text.is_empty(), !structured);
        }
        for (flags, offset, len, error) in [
            (0, SIZE, 512, NO_SPACE),
            (0, SIZE - 512, 70_000, NO_SPACE),
            (DF, 0, 512, INVALID),
            (command_flag::NO_HOLE, 0, 200_000, INVALID),
        ] {
            let cookie = client.send_write(flags, offset, &vec![0xee; len]);
            assert_eq!(
                client.reply_to(cookie).error,
                error,
                "{flags} {offset} {len}"
            );
        }
        still_works(&mut client);
    });
}

#[test]
fn too_large_payloads_are_dropped_or_end_the_connection() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in ALL {
        let (served, mut client) = Setup::with(replies).serve(&disk, &worker);
        let cookie = client.send_write(0, 0, &vec![0xee; 33 << 20]);
        assert_eq!(client.reply_to(cookie).error, 22);
        assert!(client.read(0, 4096).iter().all(|b| *b == 0));
        still_works(&mut client);
        // Only extended headers have room for lengths that are too large to receive and drop.
        if replies == Replies::Extended {
            let (_, header) = client.header(command::WRITE, 0, 0, 1 << 40);
            client.stream.write_all(&header).expect("sent");
            let ending = served.end();
            assert!(matches!(&ending, Ending::Failed(why) if why.contains("payload")));
        }
    }
}

/// As QEMU's client does it.
#[test]
fn a_write_need_not_say_that_it_has_a_payload() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    let (_served, mut client) = Setup::with(Replies::Extended).serve(&disk, &worker);
    let data = pattern(11, 70_000 & !511);
    let (cookie, header) = client.header(command::READ, 0, 4096, data.len() as u64);
    let mut bytes = header;
    bytes[7] = command::WRITE as u8;
    bytes.extend(&data);
    client.stream.write_all(&bytes).expect("sent");
    client.expect_at(cookie, command::WRITE, 4096);
    assert_eq!(client.reply_to(cookie).error, 0);
    assert_eq!(client.read(4096, data.len()), data);
}

#[test]
fn a_read_only_export_permits_no_change() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in ALL {
        let setup = Setup {
            read_only: true,
            ..Setup::with(replies)
        };
        let (_served, mut client) = setup.serve(&disk, &worker);
        assert_eq!(client.write(0, &[1; 4096]).error, 1);
        assert_eq!(client.write(0, &[1; 1 << 20]).error, 1);
        for command in [command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(client.call(command, 0, 0, 4096).error, 1);
        }
        assert_eq!(client.read(0, 4096), [0; 4096]);
        assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, 0);
    }
}

#[test]
fn errors_of_the_disk_are_told_with_their_place() {
    const BAD: u64 = 5 * MIB;
    let disk: Arc<dyn Disk> = Arc::new(FailingDisk { bad: BAD });
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in ALL {
        let (_served, mut client) = Setup::with(replies).serve(&disk, &worker);
        let place = (replies != Replies::Simple).then_some(BAD);
        let failed = |reply: Reply| {
            assert_eq!((reply.error, reply.at), (5, place));
            assert_eq!(reply.text.contains("input/output"), place.is_some());
        };
        failed(client.call(command::READ, 0, BAD, 512));
        failed(client.call(command::TRIM, 0, BAD, 4096));
        failed(client.write(BAD, &[0; 4096]));
        // The bad place lies at the start of some piece.
        let long = client.call(command::READ, 0, 4 * MIB, 4 * MIB);
        let good: usize = long.data.iter().map(|(_, data)| data.len()).sum();
        let expected = if place.is_some() { 15 << 18 } else { 0 };
        assert_eq!(good, expected, "what could be read");
        failed(long);
        failed(client.write(4 * MIB, &vec![0; 4 << 20]));
        failed(client.call(command::CACHE, 0, 4 * MIB, 4 * MIB));
        assert_eq!(client.read(0, 4096), [7; 4096]);
    }
}

#[test]
fn long_reads_come_in_chunks_unless_that_is_forbidden() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    for replies in [Replies::Structured, Replies::Extended] {
        let (_served, mut client) = Setup::with(replies).serve(&disk, &worker);
        let data = pattern(5, 16 << 20);
        assert_eq!(client.write(0, &data).error, 0);
        let whole = client.call(command::READ, command_flag::DF, 0, 32 * MIB);
        assert_eq!(whole.chunks, 1);
        assert!(whole.bytes(0, 32 << 20)[..16 << 20] == data);
        let parts = client.call(command::READ, 0, 0, SIZE);
        assert!(
            parts.chunks > 1 && parts.holes == 112 * 4,
            "{}",
            parts.holes
        );
        assert!(parts.bytes(0, SIZE as usize)[..16 << 20] == data);
    }
}

#[test]
fn a_request_after_a_long_one_does_not_wait_for_it() {
    let disk = memory();
    let worker = worker(&disk, EngineKind::IoUring);
    let (_served, mut client) = Setup::with(Replies::Structured).serve(&disk, &worker);
    assert_eq!(client.write(0, &pattern(3, 32 << 20)).error, 0);
    let (long, mut bytes) = client.header(command::READ, 0, 0, 32 * MIB);
    let (short, more) = client.header(command::READ, 0, 0, 4096);
    bytes.extend(more);
    client.stream.write_all(&bytes).expect("sent");
    assert_eq!(client.reply().0, short);
    assert_eq!(client.reply().0, long);
}

#[test]
fn direct_io_needs_no_copies_of_reads_and_large_writes() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = dir.path().join("disk.img");
    let file = std::fs::File::create(&path).expect("an image");
    file.set_len(SIZE).expect("sized");
    for kind in EngineKind::ALL {
        let options = FileOptions {
            cache: Cache::None,
            engine: kind,
            ..FileOptions::default()
        };
        let file = Arc::new(FileDisk::open(&path, options).expect("opened"));
        let disk: Arc<dyn Disk> = file.clone();
        disk.activate().expect("activated");
        let worker = worker(&disk, kind);
        for replies in ALL {
            let (served, mut client) = Setup::with(replies).serve(&disk, &worker);
            let data = pattern(9, 3 << 20);
            assert_eq!(client.write(4096, &data).error, 0);
            assert!(client.read(4096, data.len()) == data);
            let cookies: Vec<u64> = (0..64)
                .map(|n| client.send(command::READ, 0, n * 8192, 4096))
                .collect();
            for _ in &cookies {
                let (cookie, reply) = client.reply();
                assert!(cookies.contains(&cookie) && reply.error == 0);
            }
            assert_eq!(file.bounced(), 0, "{kind}");
            assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, 0);
            client.disconnect();
            assert_eq!(served.end(), Ending::Disconnected);
        }
        drop(worker);
        disk.deactivate().expect("deactivated");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        sector: u64,
        sectors: usize,
    },
    Read {
        sector: u64,
        sectors: usize,
    },
    Zero {
        sector: u64,
        sectors: usize,
    },
    Wrong {
        command: u16,
        flags: u16,
        len: usize,
    },
}

/// Offset and data of the expected reply to a read. `None`: the reply has no data.
type Answer = Option<(u64, Vec<u8>)>;

/// Number of sectors of the part of the disk that steps touch.
const SECTORS: u64 = 2048;

fn step() -> impl Strategy<Value = Step> {
    let range = || {
        (
            0..SECTORS - 700,
            prop_oneof![1..9usize, 30..40usize, 500..700usize],
        )
    };
    prop_oneof![
        4 => range().prop_map(|(sector, sectors)| Step::Write { sector, sectors }),
        4 => range().prop_map(|(sector, sectors)| Step::Read { sector, sectors: sectors.min(512) }),
        1 => range().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        1 => (any::<u16>(), any::<u16>(), 0..50_000usize)
            .prop_map(|(command, flags, len)| Step::Wrong { command, flags, len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The stream may be cut anywhere.
    #[test]
    fn fragments_are_put_together(
        steps in prop::collection::vec(step(), 1..40),
        cuts in prop::collection::vec(1..60_000usize, 1..20),
        kind in prop::sample::select(EngineKind::ALL.to_vec()),
        replies in prop::sample::select(ALL.to_vec()),
    ) {
        let disk = memory();
        let worker = worker(&disk, kind);
        let (served, mut client) = Setup::with(replies).serve(&disk, &worker);
        let mut model = vec![0; SECTORS as usize * 512];
        let mut stream = Vec::new();
        let mut expected: Vec<(u64, Answer)> = Vec::new();
        for (n, step) in steps.iter().enumerate() {
            // A memory disk executes one request after the other. (Requests that follow a longer
            // read may overtake it.)
            match *step {
                Step::Write { sector, sectors } => {
                    let data = pattern(n as u64, sectors * 512);
                    let (cookie, header) = client.header(command::WRITE, 0, sector * 512, data.len() as u64);
                    model[sector as usize * 512..][..data.len()].copy_from_slice(&data);
                    stream.extend(header);
                    stream.extend(data);
                    expected.push((cookie, None));
                }
                Step::Read { sector, sectors } => {
                    let (at, len) = (sector * 512, sectors * 512);
                    let (cookie, header) = client.header(command::READ, 0, at, len as u64);
                    stream.extend(header);
                    expected.push((cookie, Some((at, model[at as usize..][..len].to_vec()))));
                }
                Step::Zero { sector, sectors } => {
                    let (at, len) = (sector * 512, sectors * 512);
                    let (cookie, header) = client.header(command::WRITE_ZEROES, 0, at, len as u64);
                    model[at as usize..][..len].fill(0);
                    stream.extend(header);
                    expected.push((cookie, None));
                }
                Step::Wrong { command, flags, len } => {
                    let header = RequestHeader {
                        flags: flags | 1 << 14,
                        command: if command == command::DISC { 1 } else { command },
                        cookie: u64::MAX,
                        offset: 0,
                        len: len as u64,
                    };
                    header.put(replies, &mut stream);
                    if header.has_payload(replies) {
                        stream.extend(vec![0xee; len]);
                    }
                }
            }
        }
        let wrong = steps.iter().filter(|s| matches!(s, Step::Wrong { .. })).count();
        let mut sender = client.stream.try_clone().expect("cloned");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut rest = &stream[..];
                for cut in cuts.iter().cycle() {
                    let (now, later) = rest.split_at(rest.len().min(*cut));
                    sender.write_all(now).expect("sent");
                    rest = later;
                    if rest.is_empty() {
                        break;
                    }
                    std::thread::yield_now();
                }
            });
            for _ in 0..wrong {
                client.expect(u64::MAX, command::WRITE);
            }
            let mut refused = 0;
            for _ in 0..expected.len() + wrong {
                let (cookie, reply) = client.reply();
                if cookie == u64::MAX {
                    assert_eq!(reply.error, 22);
                    refused += 1;
                    client.expect(u64::MAX, command::WRITE);
                    continue;
                }
                let at = expected.iter().position(|(c, _)| *c == cookie).expect("sent");
                match expected.swap_remove(at).1 {
                    Some((offset, data)) => assert!(reply.bytes(offset, data.len()) == data),
                    None => assert_eq!(reply.error, 0),
                }
            }
            assert_eq!(refused, wrong);
        });
        client.disconnect();
        assert_eq!(served.end(), Ending::Disconnected);
    }
}
