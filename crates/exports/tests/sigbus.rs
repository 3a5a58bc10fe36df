//! Tests of SIGBUS: faults in memory that a front-end truncates are handled despite resource
//! limits, and other faults are fatal.

mod support;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use support::guest::{IN, MEMORY_SIZE, Memory, Queue, eventually, negotiate};
use support::served::Served;
use vhost::vhost_user::VhostUserFrontend;

const CHILD: &str = "FATHOM_TEST_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs one test of this file in a process of its own.
fn run(test: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "")
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap()
}

/// Truncates a guest's rings.
fn truncate_rings(served: &Served) {
    let (memory, _frontend, queue) = served.guest();
    memory.0.set_len(0).unwrap();
    queue.kick();
    served.wait_for_disconnect();
}

/// Truncates two regions of `len` bytes while a guest reads into them.
fn truncate_data(served: &Served, len: u64) {
    let memory = Memory::new();
    memory.0.set_len(MEMORY_SIZE + 2 * len).unwrap();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    let starts = [MEMORY_SIZE, MEMORY_SIZE + len];
    for start in starts {
        let region = memory.part(start, len);
        frontend.add_mem_region(&region).unwrap();
    }
    served.disk.hold();
    for (slot, start) in (0..).zip(starts) {
        queue.offer(slot, IN, 0, start + 4096, 512);
    }
    queue.kick();
    eventually("both are held", || served.disk.held.load(SeqCst) == 2);
    memory.0.set_len(MEMORY_SIZE).unwrap();
    served.disk.release();
    served.wait_for_disconnect();
}

fn set_limit(resource: Resource, bytes: u64) {
    let limit = Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    setrlimit(resource, limit).unwrap();
}

/// Installs and uses the handler, and then faults in other memory.
fn fault() -> ! {
    truncate_rings(&Served::new());
    // The test must not dump core.
    set_limit(Resource::Core, 0);
    let file = tempfile::tempfile().unwrap();
    let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: this is a new mapping of an empty file; reading it faults.
    unsafe {
        let page = mmap(std::ptr::null_mut(), 4096, read, shared, &file, 0);
        page.unwrap().cast::<u8>().read_volatile();
    }
    panic!("survived");
}

#[test]
fn other_faults_are_fatal() {
    if is_child() {
        fault();
    }
    let status = run("other_faults_are_fatal");
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn a_limit_of_data_does_not_matter() {
    if !is_child() {
        let status = run("a_limit_of_data_does_not_matter");
        return assert!(status.success(), "{status}");
    }
    let served = Served::new();
    // Enough for the test, but not for the truncated regions.
    set_limit(Resource::Data, 256 << 20);
    truncate_data(&served, 64 << 30);
    let (_memory, _frontend, mut queue) = served.guest();
    queue.check_read(0, 3);
}
