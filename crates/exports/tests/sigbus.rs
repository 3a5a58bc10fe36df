//! Faults that are not a front-end's doing end the process as they always do.

mod support;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use support::guest::{Memory, Queue, eventually, negotiate};
use support::served::Served;

const FAULT: &str = "FATHOM_TEST_FAULT";

/// Have the handler installed, and used; then fault elsewhere.
fn fault() -> ! {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    memory.0.set_len(0).unwrap();
    queue.kick();
    eventually("the truncation is survived", || {
        served.export.status() == Default::default()
    });
    // No core dump of the test's memory.
    let no_core = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(rustix::process::Resource::Core, no_core).unwrap();
    let file = tempfile::tempfile().unwrap();
    let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: a new mapping, of an empty file; reading it faults.
    unsafe {
        let page = mmap(std::ptr::null_mut(), 4096, read, shared, &file, 0);
        page.unwrap().cast::<u8>().read_volatile();
    }
    panic!("survived");
}

#[test]
fn other_faults_are_fatal() {
    if std::env::var_os(FAULT).is_some() {
        fault();
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_faults_are_fatal", "--nocapture"])
        .env(FAULT, "")
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}
