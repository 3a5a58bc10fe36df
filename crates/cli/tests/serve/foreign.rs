//! Checks a front-end of another project: the `virtio-driver` crate, with which user-space programs
//! use a disk without a virtual machine.

use crate::driver::{Driver, Request, with_disk};
use crate::support::nbd::python;
use crate::support::{Served, as_arg};
use std::fs::File;
use std::os::unix::fs::FileExt;

const BLOCK: usize = 4096;
const BLOCKS: usize = 256;

fn pattern(block: usize) -> Vec<u8> {
    (0..BLOCK).map(|i| (block * 31 + i * 7) as u8).collect()
}

fn write(block: usize) -> Request {
    Request::Write {
        offset: (block * BLOCK) as u64,
        data: pattern(block),
    }
}

fn read(block: usize) -> Request {
    Request::Read {
        offset: (block * BLOCK) as u64,
        len: BLOCK,
    }
}

/// Writes each block on one queue, flushes, and reads the block on the other queue.
fn write_and_read(disk: &mut Driver<'_>) {
    let writes: Vec<_> = (0..BLOCKS).map(write).collect();
    assert!(disk.all(&writes).iter().all(Result::is_ok));
    assert_eq!(disk.all(&[Request::Flush]), [Ok(Vec::new())]);
    let others = (0..BLOCKS).map(|index| index ^ 1);
    let reads: Vec<_> = others.clone().map(read).collect();
    for (block, found) in others.zip(disk.all(&reads)) {
        assert_eq!(found, Ok(pattern(block)), "block {block}");
    }
}

/// Writes zeroes to the first block. Requests past the end fail, and have no other effect.
fn write_zeroes(disk: &mut Driver<'_>) {
    let (size, len) = ((BLOCK * BLOCKS) as u64, BLOCK as u64);
    assert_eq!(disk.size(), size);
    let zeroes = |offset, unmap| Request::WriteZeroes { offset, len, unmap };
    let beyond = Request::Discard { offset: size, len };
    let outcomes = disk.all(&[zeroes(0, true), zeroes(size, false), beyond]);
    let succeeded: Vec<_> = outcomes.iter().map(Result::is_ok).collect();
    assert_eq!(succeeded, [true, false, false], "{outcomes:?}");
    assert!(disk.contents()[..BLOCK].iter().all(|byte| *byte == 0));
}

#[test]
fn a_driver_that_is_not_ours_reads_what_it_wrote() {
    for aio in ["io_uring", "native", "threads"] {
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let image = scratch.path().join("image");
        let file = File::create(&image).expect("an image");
        file.set_len((BLOCK * BLOCKS) as u64).expect("sized");
        let mut served = Served::start(&as_arg(&image), &["--aio", aio, "--iothreads", "2"]);
        with_disk(&served.arg("s"), 2, |disk| {
            write_and_read(disk);
            write_zeroes(disk);
        });
        assert_eq!(served.terminate().0, Some(0));

        let mut contents = vec![0; BLOCK];
        let file = File::open(image).expect("the image");
        for block in 0..BLOCKS {
            file.read_exact_at(&mut contents, (block * BLOCK) as u64)
                .expect("read");
            let expected = match block {
                0 => vec![0; BLOCK],
                _ => pattern(block),
            };
            assert!(contents == expected, "{aio}: block {block}");
        }
    }
}

/// A front-end whose call eventfd is full gets no more interrupts. The log says why.
#[test]
fn a_call_eventfd_that_is_full_is_told() {
    let mut served = Served::start("null:1M", &[]);
    let script = "
import os, socket, struct
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ['SOCKET'])
call = os.eventfd(0, 0)
os.eventfd_write(call, 2 ** 64 - 2)
# SET_VRING_CALL, and GET_FEATURES for its answer.
socket.send_fds(s, [struct.pack('<IIIQ', 13, 1, 8, 0)], [call])
s.sendall(struct.pack('<III', 1, 1, 0))
assert len(s.recv(20, socket.MSG_WAITALL)) == 20
";
    python(script, &[("SOCKET", &served.arg("s"))]);
    served.wait_for("vring 0: its call eventfd was already full");
}
