//! Tests of front-ends that map more than their share. The tests run in a process of their own,
//! since the share depends on the number of disks in the process.

mod support;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::fs::File;
use std::os::fd::AsRawFd;
use support::guest::negotiate_features;
use support::raw::Raw;
use support::served::Served;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};

/// Lets one test run at a time.
static ALONE: Mutex<()> = Mutex::new(());

const LARGEST: u64 = 1 << 46;

/// Returns the `index`th region. The region's addresses leave room for any size.
fn region(file: &File, index: u64, size: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: index << 47,
        memory_size: size,
        userspace_addr: index << 47,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

fn sparse_file() -> File {
    let file = File::from(memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(LARGEST).unwrap();
    file
}

/// Maps regions of halving sizes until not even a page is accepted. Returns the number of regions.
fn take_all(frontend: &mut Frontend, file: &File) -> u64 {
    let mut count = 0;
    let mut size = LARGEST;
    while size >= 4096 {
        match frontend.add_mem_region(&region(file, count, size)) {
            Ok(_) => count += 1,
            Err(_) => size /= 2,
        }
    }
    count
}

#[test]
fn a_front_end_cannot_take_the_address_space_from_others() {
    let _alone = ALONE.lock();
    let (greedy, other) = (Served::new(), Served::new());
    let file = sparse_file();
    let mut frontend = greedy.connect();
    negotiate_features(&mut frontend);
    assert!(take_all(&mut frontend, &file) > 1);
    // The process can still map what it and the other front-end need.
    let tib = 1 << 40;
    let (access, flags) = (ProtFlags::READ, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: this is a new mapping that no other code uses.
    unsafe {
        let mapped = mmap_anonymous(std::ptr::null_mut(), tib, access, flags);
        munmap(mapped.unwrap(), tib).unwrap();
    }
    let (_memory, mut other_frontend, mut queue) = other.guest();
    let large = region(&file, 1, tib as u64);
    other_frontend.add_mem_region(&large).unwrap();
    queue.check_read(0, 3);
    // The greedy front-end can release a region and map it again.
    let first = region(&file, 0, LARGEST / 2);
    frontend.remove_mem_region(&first).unwrap();
    frontend.add_mem_region(&first).unwrap();
}

#[test]
fn other_mappings_than_memory_count_as_well() {
    let _alone = ALONE.lock();
    let served = Served::new();
    let file = sparse_file();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let fits = region(&file, 0, LARGEST);
    frontend.set_mem_table(&[fits]).unwrap();
    let log = VhostUserDirtyLogRegion {
        // The process has enough addresses for the log, but the share is too small.
        mmap_size: LARGEST / 2 + 4096,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    frontend.set_log_base(0, Some(log)).unwrap_err();
    assert!(Raw::new(&frontend).is_closed());
    // The end of the connection releases everything.
    served.wait_for_disconnect();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    frontend.set_mem_table(&[fits]).unwrap();
}

#[test]
fn each_front_end_can_have_as_many_regions_as_it_was_told() {
    let _alone = ALONE.lock();
    let file = sparse_file();
    let disks: Vec<Served> = (0..18).map(|_| Served::new()).collect();
    let frontends: Vec<(Frontend, u64)> = disks
        .iter()
        .map(|disk| {
            let mut frontend = disk.connect();
            negotiate_features(&mut frontend);
            let slots = frontend.get_max_mem_slots().unwrap();
            for index in 0..slots {
                frontend
                    .add_mem_region(&VhostUserMemoryRegionInfo {
                        guest_phys_addr: index << 12,
                        userspace_addr: index << 12,
                        ..region(&file, 0, 4096)
                    })
                    .unwrap_or_else(|e| panic!("region {index} of {slots}: {e}"));
            }
            (frontend, slots)
        })
        .collect();
    let sum: u64 = frontends.iter().map(|(_, slots)| slots).sum();
    assert!(sum > 18 * 400, "{sum}");
}
