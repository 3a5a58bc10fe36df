//! Access to memory whose file was truncated.

use fathom_sigbus::{Alarm, Guarded, Spare};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;

struct Bell {
    rung: AtomicU64,
    spare: Spare,
}

impl Alarm for Bell {
    fn raise(&self) {
        self.rung.fetch_add(1, Ordering::SeqCst);
    }

    fn spare(&self) -> &Spare {
        &self.spare
    }
}

struct Memory {
    guard: Option<Guarded>,
    start: *mut u8,
    len: usize,
    file: OwnedFd,
}

impl Memory {
    fn new(pages: usize, bell: &Arc<Bell>) -> Memory {
        let len = pages * PAGE;
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: creates a new mapping.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, flags, &file, 0) };
        let start: *mut u8 = start.unwrap().cast();
        Memory {
            guard: Some(Guarded::new(start, len, PAGE, bell.clone()).unwrap()),
            start,
            len,
            file,
        }
    }

    fn read(&self, page: usize) -> u8 {
        // SAFETY: the address is within the mapping.
        unsafe { self.start.add(page * PAGE).read_volatile() }
    }

    fn write(&self, page: usize, value: u8) {
        // SAFETY: the address is within the mapping.
        unsafe { self.start.add(page * PAGE).write_volatile(value) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: `new` made this mapping.
        unsafe { munmap(self.start.cast(), self.len).unwrap() };
    }
}

fn bell() -> Arc<Bell> {
    Arc::new(Bell {
        rung: AtomicU64::new(0),
        spare: Spare::new().unwrap(),
    })
}

#[test]
fn what_is_truncated_reads_as_zeroes_and_keeps_what_is_written() {
    let (bell, others) = (bell(), bell());
    let (memory, other) = (Memory::new(1 << 20, &bell), Memory::new(64, &others));
    memory.write(0, 1);
    memory.write(1000, 2);
    for memory in [&memory, &other] {
        ftruncate(&memory.file, PAGE as u64).unwrap();
    }
    memory.write(2000, 3);
    assert_eq!(memory.read(1000), 0);
    assert_eq!(memory.read(0), 1);
    assert_eq!(memory.read(memory.len / PAGE - 1), 0);
    memory.write(1000, 4);
    assert_eq!(memory.read(1000), 4);
    // The handler replaces memory from page 2000 on, and then from page 1000 on.
    assert_eq!(bell.rung.load(Ordering::SeqCst), 2);
    // Mappings with another `Spare` do not see what was written.
    assert!((1..64).all(|page| other.read(page) == 0));
    assert_eq!(others.rung.load(Ordering::SeqCst), 1);
}

#[test]
fn spare_page_is_used_when_the_kernel_has_none() {
    let bell = bell();
    let memory = Memory::new(64, &bell);
    ftruncate(&memory.file, 0).unwrap();
    assert_eq!(memory.read(3), 0);
    // Truncates the spare memory, so that its replaced pages raise SIGBUS again.
    ftruncate(&bell.spare, PAGE as u64).unwrap();
    for page in 3..64 {
        memory.write(page, page as u8);
        assert_eq!(memory.read(page), page as u8);
    }
}

#[test]
fn more_mappings_than_the_table_had_room_for_at_first() {
    let bell = bell();
    let memories: Vec<Memory> = (0..1500).map(|_| Memory::new(1, &bell)).collect();
    for memory in &memories {
        ftruncate(&memory.file, 0).unwrap();
        assert_eq!(memory.read(0), 0);
    }
    assert_eq!(bell.rung.load(Ordering::SeqCst), 1500);
}
