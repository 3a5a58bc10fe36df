//! Operations in flight by io_uring.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, types};

use super::engine::{Done, Flight};
use super::target::Memory;

pub(super) struct Uring<'a> {
    ring: IoUring,
    file: BorrowedFd<'a>,
    memory: &'a Memory,
    write: bool,
    in_flight: u32,
}

impl<'a> Uring<'a> {
    pub fn new(
        file: BorrowedFd<'a>,
        memory: &'a Memory,
        write: bool,
        depth: u32,
    ) -> io::Result<Uring<'a>> {
        Ok(Uring {
            ring: IoUring::new(depth)?,
            file,
            memory,
            write,
            in_flight: 0,
        })
    }
}

impl Flight for Uring<'_> {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn queue(&mut self, slot: u32, offset: u64) {
        let (memory, length) = self.memory.slot(slot);
        let fd = types::Fd(self.file.as_raw_fd());
        // A block is at most 64 MiB.
        let length = length as u32;
        let entry = if self.write {
            opcode::Write::new(fd, memory, length)
                .offset(offset)
                .build()
        } else {
            opcode::Read::new(fd, memory, length).offset(offset).build()
        };
        // SAFETY: the slot's memory and the file stay until `self` is dropped, which waits for
        // everything in flight; the slot is in flight only once, so nobody else uses its memory.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot.into())) };
        pushed.expect("the ring has an entry for every slot");
        self.in_flight += 1;
    }

    fn submit(&mut self, wait: u32) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wait as usize) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(_) => return Ok(()),
            }
        }
    }

    fn reap(&mut self) -> Option<Done> {
        let entry = self.ring.completion().next()?;
        self.in_flight -= 1;
        Some(Done {
            slot: entry.user_data() as u32,
            result: entry.result().into(),
        })
    }
}

impl Drop for Uring<'_> {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            // An error here leaves the kernel with our memory: there is no way on.
            self.submit(1)
                .expect("io_uring cannot wait for its operations");
            while self.reap().is_some() {}
        }
    }
}
