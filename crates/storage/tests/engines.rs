//! Tests the contract of every engine with its worker.

#[path = "engines/sockets.rs"]
mod sockets;

use fathom_core::{Buffer, Completion, Engine, FileId, Io, IoKind, RequestId, Token, Wait};
use fathom_storage::engine::DEVICE_DISCARD;
use fathom_storage::{EngineKind, engine};
use libc::iovec;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

/// Runs the test with each engine, on a thread of its own: destroying a ring interrupts the system
/// calls of its thread.
fn each(test: impl Fn(Box<dyn Engine>) + Sync) {
    for kind in EngineKind::ALL {
        let body = || {
            let engine = engine(kind).expect("an engine");
            assert_eq!(engine.name(), kind.name(), "this kernel has all engines");
            test(engine);
        };
        let ended = std::thread::scope(|scope| scope.spawn(body).join());
        assert!(ended.is_ok(), "{kind}");
    }
}

fn file(len: u64) -> File {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
    file.set_len(len).expect("sized");
    file
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

fn signal(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).expect("signalled");
}

fn token(n: u32) -> Token {
    Token::request(RequestId(n), 0)
}

fn io(kind: IoKind, file: FileId, offset: u64, iov: &[iovec]) -> Io {
    Io {
        kind,
        file,
        offset,
        len: iov.iter().map(|v| v.iov_len as u64).sum(),
        iov: iov.as_ptr(),
        iov_len: iov.len() as u32,
    }
}

fn iov(bytes: &mut [u8]) -> iovec {
    iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

/// Submits until `n` completions have arrived.
fn reap(engine: &mut dyn Engine, n: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    while out.len() < n {
        engine.submit(Wait::Forever, &mut out).expect("submitted");
    }
    assert_eq!(out.len(), n);
    out
}

fn nothing_more(engine: &mut dyn Engine) {
    let mut out = Vec::new();
    for _ in 0..40 {
        engine.submit(Wait::No, &mut out).expect("submitted");
    }
    assert_eq!(out, []);
}

/// # Safety
/// As for [`Engine::push`]. The function waits for the completion.
unsafe fn run(engine: &mut dyn Engine, io: Io) -> i32 {
    // SAFETY: as required of the caller.
    unsafe { engine.push(io, token(7)) };
    let done = reap(engine, 1);
    assert_eq!(done[0].token, token(7));
    done[0].result
}

#[test]
fn data_goes_where_it_should() {
    each(|mut engine| {
        let engine = &mut *engine;
        let file = file(1 << 20);
        let id = engine.add_file(file.as_fd()).expect("added");
        let mut bytes: Vec<u8> = (0..12288u32).map(|i| (i / 7) as u8).collect();
        let original = bytes.clone();
        let (a, b) = bytes.split_at_mut(5000);
        let two = [iov(a), iov(b)];
        // SAFETY: `run` waits for the completion.
        let write = |engine: &mut dyn Engine, dsync, offset| unsafe {
            run(engine, io(IoKind::Write { dsync }, id, offset, &two))
        };
        assert_eq!(write(engine, false, 4096), 12288);
        assert_eq!(write(engine, true, 40960), 12288);
        let mut read = vec![0; 12288];
        let one = [iov(&mut read)];
        // SAFETY: `run` waits for the completion.
        let n = unsafe { run(engine, io(IoKind::Read, id, 40960, &one)) };
        assert_eq!((n, &read), (12288, &original));
        let one = [iov(&mut read)];
        // SAFETY: `run` waits for the completion.
        let n = unsafe { run(engine, io(IoKind::Read, id, (1 << 20) - 512, &one)) };
        assert_eq!(n, 512, "short at the end of the file");
        // SAFETY: `run` waits for the completion.
        assert_eq!(unsafe { run(engine, io(IoKind::Sync, id, 0, &[])) }, 0);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let punch = Io {
            len: 8192,
            ..io(IoKind::Allocate { mode }, id, 4096, &[])
        };
        // SAFETY: `run` waits for the completion.
        assert_eq!(unsafe { run(engine, punch) }, 0);
        let mut left = vec![0; 12288];
        file.read_exact_at(&mut left, 4096).expect("read");
        assert!(left[..8192].iter().all(|b| *b == 0));
        assert_eq!(left[8192..], original[8192..]);
        nothing_more(engine);
    });
}

#[test]
fn what_fails_is_a_result() {
    each(|mut engine| {
        let engine = &mut *engine;
        let readable = File::open("/proc/self/exe").expect("opened");
        let id = engine.add_file(readable.as_fd()).expect("added");
        let mut bytes = vec![0; 512];
        let one = [iov(&mut bytes)];
        let write = io(IoKind::Write { dsync: false }, id, 0, &one);
        // SAFETY: `run` waits for the completion.
        assert_eq!(unsafe { run(engine, write) }, -libc::EBADF);
        let nowhere = [iovec {
            iov_base: 8 as *mut libc::c_void,
            iov_len: 512,
        }];
        // SAFETY: the kernel checks addresses, and nothing else uses this one.
        let n = unsafe { run(engine, io(IoKind::Read, id, 0, &nowhere)) };
        assert_eq!(n, -libc::EFAULT);
    });
}

#[test]
fn device_discards_are_for_devices() {
    each(|mut engine| {
        let engine = &mut *engine;
        let file = file(1 << 20);
        let id = engine.add_file(file.as_fd()).expect("added");
        let event = event();
        let kind = IoKind::Allocate {
            mode: DEVICE_DISCARD,
        };
        let discard = Io {
            len: 4096,
            ..io(kind, id, 0, &[])
        };
        for _ in 0..3 {
            // SAFETY: `run` waits for the completion.
            assert_eq!(unsafe { run(engine, discard) }, -libc::ENOTTY);
        }
        // The threads that run discards must not hide other events.
        engine
            .watch(event.as_raw_fd(), Token::MAILBOX)
            .expect("watched");
        signal(&event);
        assert_eq!(reap(engine, 1)[0].token, Token::MAILBOX);
        nothing_more(engine);
    });
}

#[test]
fn any_number_of_operations_completes_once_each() {
    const OPERATIONS: u32 = 10_000;
    each(|mut engine| {
        let engine = &mut *engine;
        let file = file(1 << 20);
        let id = engine.add_file(file.as_fd()).expect("added");
        engine.reserve(100).expect("room");
        let mut bytes = vec![0; 512];
        let one = [iov(&mut bytes)];
        for n in 0..OPERATIONS {
            // SAFETY: all operations are waited for; racing reads of zeroes give zeroes.
            unsafe {
                engine.push(
                    io(IoKind::Read, id, u64::from(n % 2048) * 512, &one),
                    token(n),
                )
            };
        }
        assert!(engine.ready(), "there is work to submit");
        let done = reap(engine, OPERATIONS as usize);
        let tokens: HashSet<u64> = done.iter().map(|c| c.token.to_u64()).collect();
        assert_eq!(tokens.len(), OPERATIONS as usize);
        assert!(done.iter().all(|c| c.result == 512));
        nothing_more(engine);
    });
}

#[test]
fn signals_are_seen_again_and_again() {
    each(|mut engine| {
        let engine = &mut *engine;
        let (early, other) = (event(), event());
        let (a, b) = (Token::kick(1, 1), Token::kick(2, 1));
        signal(&early);
        engine.watch(early.as_raw_fd(), a).expect("watched");
        engine.watch(other.as_raw_fd(), b).expect("watched");
        assert_eq!(reap(engine, 1)[0].token, a, "signalled before");
        for _ in 0..100 {
            signal(&other);
            assert_eq!(reap(engine, 1)[0].token, b);
        }
        nothing_more(engine);
        engine.unwatch(other.as_raw_fd(), b);
        nothing_more(engine);
        signal(&other);
        nothing_more(engine);
        engine
            .watch(other.as_raw_fd(), Token::kick(2, 2))
            .expect("watched");
        assert_eq!(reap(engine, 1)[0].token, Token::kick(2, 2));
    });
}

#[test]
fn kicks_are_seen_while_requests_keep_coming() {
    each(|mut engine| {
        let engine = &mut *engine;
        let file = file(1 << 20);
        let id = engine.add_file(file.as_fd()).expect("added");
        let event = event();
        engine
            .watch(event.as_raw_fd(), Token::kick(0, 1))
            .expect("watched");
        signal(&event);
        let mut bytes = vec![0; 512];
        let one = [iov(&mut bytes)];
        let mut out = Vec::new();
        let kicked = (0..1000).any(|n| {
            // SAFETY: all operations are waited for.
            unsafe { engine.push(io(IoKind::Read, id, 0, &one), token(n)) };
            while !out.iter().any(|c: &Completion| c.token == token(n)) {
                engine.submit(Wait::No, &mut out).expect("submitted");
            }
            out.iter().any(|c| c.token == Token::kick(0, 1))
        });
        assert!(kicked);
    });
}

#[test]
fn waits_end_when_they_should() {
    each(|mut engine| {
        let engine = &mut *engine;
        let event = event();
        engine
            .watch(event.as_raw_fd(), Token::MAILBOX)
            .expect("watched");
        nothing_more(engine);
        let mut out = Vec::new();
        let (start, wait) = (Instant::now(), Duration::from_millis(20));
        engine.submit(Wait::For(wait), &mut out).expect("waited");
        assert!(start.elapsed() >= wait);
        assert_eq!(out, []);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                signal(&event);
            });
            assert_eq!(reap(engine, 1)[0].token, Token::MAILBOX);
        });
    });
}

#[test]
fn dropping_an_engine_waits_for_its_operations() {
    const LEN: usize = 32 << 20;
    each(|mut engine| {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
        file.as_file().set_len(64 << 20).expect("sized");
        // Linux AIO completes buffered I/O during submission.
        let direct = File::options()
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(file.path())
            .expect("opened");
        let id = engine.add_file(direct.as_fd()).expect("added");
        let mut bytes = vec![1u8; LEN + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        let one = [iov(&mut bytes[start..start + LEN])];
        let mut out = Vec::new();
        // SAFETY: the engine is dropped before the buffer.
        unsafe { engine.push(io(IoKind::Write { dsync: true }, id, 0, &one), token(1)) };
        engine.submit(Wait::No, &mut out).expect("submitted");
        drop(engine);
        let mut last = [0];
        let read = file.as_file().read_exact_at(&mut last, LEN as u64 - 1);
        read.expect("read");
        assert_eq!(last, [1]);
    });
}

#[test]
fn files_are_known_by_number() {
    each(|mut engine| {
        let engine = &mut *engine;
        let (one, two) = (file(512), file(1024));
        let first = engine.add_file(one.as_fd()).expect("added");
        let second = engine.add_file(two.as_fd()).expect("added");
        let mut bytes = vec![0; 4096];
        let iovs = [iov(&mut bytes)];
        // SAFETY: `run` waits for the completion.
        let read =
            |engine: &mut dyn Engine, id| unsafe { run(engine, io(IoKind::Read, id, 0, &iovs)) };
        assert_eq!((read(engine, first), read(engine, second)), (512, 1024));
        engine.remove_file(first);
        assert_eq!(read(engine, second), 1024);
        let third = file(2048);
        let third_id = engine.add_file(third.as_fd()).expect("added");
        assert_eq!(read(engine, third_id), 2048);
    });
}

#[test]
fn a_larger_ring_keeps_files_and_watches() {
    each(|mut engine| {
        let engine = &mut *engine;
        let file = file(512);
        let id = engine.add_file(file.as_fd()).expect("added");
        let event = event();
        engine
            .watch(event.as_raw_fd(), Token::MAILBOX)
            .expect("watched");
        engine.reserve(20_000).expect("room");
        let mut bytes = vec![0; 512];
        let one = [iov(&mut bytes)];
        // SAFETY: `run` waits for the completion.
        assert_eq!(unsafe { run(engine, io(IoKind::Read, id, 0, &one)) }, 512);
        signal(&event);
        assert_eq!(reap(engine, 1)[0].token, Token::MAILBOX);
    });
}

/// Amount of memory in KiB that this process has pinned.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with("VmPin:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse().ok()).expect("VmPin")
}

/// The kernel pins registered memory while a user needs it. I/O with such memory moves the right
/// bytes, in one segment or several, or partly outside. No other test of this program pins memory.
#[test]
fn registered_memory_is_pinned_and_serves_io() {
    const LEN: usize = 1 << 20;
    let mut engine = engine(EngineKind::IoUring).expect("an engine");
    assert!(engine.pin_memory(), "this kernel registers buffers");
    let file = file(LEN as u64);
    let id = engine.add_file(file.as_fd()).expect("added");
    let mut memory = vec![0u8; LEN];
    let mut outside = vec![0u8; 4096];
    let addr = memory.as_ptr() as usize;
    let buffers = [
        Buffer { addr, len: LEN / 2 },
        Buffer {
            addr: addr + LEN / 2,
            len: LEN / 2,
        },
    ];
    let before = pinned();
    // SAFETY: the buffers are removed below, before the memory is freed.
    unsafe { engine.add_memory(&buffers) };
    // SAFETY: the buffers are removed below, before the memory is freed.
    unsafe { engine.add_memory(&buffers) };
    assert!(
        pinned() >= before + (LEN >> 10) as u64,
        "nothing was pinned"
    );
    engine
        .reserve(20_000)
        .expect("a larger ring, which must know the memory, too");
    assert!(
        pinned() >= before + (LEN >> 10) as u64,
        "forgotten by the larger ring"
    );

    let fill = |bytes: &mut [u8], salt: usize| {
        (0..)
            .zip(bytes)
            .for_each(|(i, byte): (usize, _)| *byte = (i * 7 + i / 256 + salt) as u8);
    };
    for (round, still_added) in [true, true, false].into_iter().enumerate() {
        fill(&mut memory, round);
        fill(&mut outside, round + 100);
        let (left, right) = memory.split_at_mut(LEN / 2);
        let cases = [
            vec![iov(&mut left[4096..8192])],
            vec![iov(&mut left[..512]), iov(&mut left[8192..12288])],
            vec![iov(&mut left[LEN / 2 - 512..]), iov(&mut right[..512])],
            vec![iov(&mut right[..512]), iov(&mut outside)],
        ];
        for segments in &cases {
            let len: usize = segments.iter().map(|v| v.iov_len).sum();
            // SAFETY: the segments outlive the operation.
            let written = unsafe {
                run(
                    &mut *engine,
                    io(IoKind::Write { dsync: false }, id, 512, segments),
                )
            };
            assert_eq!(written, len as i32);
            let mut expected = Vec::new();
            for v in segments {
                // SAFETY: a segment of the vectors above, which nothing writes to now.
                expected.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(v.iov_base.cast::<u8>(), v.iov_len)
                });
                // SAFETY: a segment of the vectors above; it is read back below.
                unsafe { std::ptr::write_bytes(v.iov_base.cast::<u8>(), 0xee, v.iov_len) };
            }
            let mut on_disk = vec![0; len];
            file.read_exact_at(&mut on_disk, 512).expect("read");
            assert!(on_disk == expected, "what was written");
            // SAFETY: the segments outlive the operation.
            let read = unsafe { run(&mut *engine, io(IoKind::Read, id, 512, segments)) };
            assert_eq!(read, len as i32);
            // SAFETY: a segment of the vectors above, which nothing writes to now.
            let parts = segments
                .iter()
                .map(|v| unsafe { std::slice::from_raw_parts(v.iov_base.cast::<u8>(), v.iov_len) });
            assert!(parts.flatten().eq(&expected), "what was read");
        }
        if still_added {
            assert!(pinned() > before, "unpinned too early");
            engine.remove_memory(&buffers);
        }
    }
    // The smaller ring's share is unpinned when the kernel has destroyed that ring.
    fathom_testing::until("unpinned memory", || pinned() <= before);
}

#[test]
fn names_go_both_ways() {
    for kind in EngineKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    assert!("aio".parse::<EngineKind>().is_err());
}

/// Makes io_uring_setup(2) fail for this thread, as containers do.
fn forbid_io_uring() {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let eperm = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let setup = libc::SYS_io_uring_setup as u32;
    let mut filter = [
        // The number of the system call is the first field of seccomp_data.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, setup),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, eperm),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program is valid during the calls, which affect only this thread.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

#[test]
fn threads_take_over_where_io_uring_is_not_permitted() {
    let name = std::thread::spawn(|| {
        forbid_io_uring();
        engine(EngineKind::IoUring).expect("an engine").name()
    });
    assert_eq!(name.join().expect("no panic"), "threads");
}
