//! Records the system calls of a disk's server that has no timestamps of its own: its waits for
//! work and its I/O submissions. From these, a report derives when the server woke, submitted the
//! I/O and received the result.

use std::collections::HashMap;

use fathom_run::{Event, IO_CALLS, Kind, Role, Thread, io_call};

use super::scene::Scene;
use super::syscalls::{self, Syscalls};
use super::{Collector, Tracefs, boxed};
use crate::error::Result;

pub use super::syscalls::Options;

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "io-calls";

/// Starts to record these calls of the server's threads.
///
/// # Errors
/// When the kernel cannot trace system calls, or a thread belongs to this process.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Syscalls> {
    let numbers: Vec<u64> = IO_CALLS.iter().map(|(number, _)| *number).collect();
    syscalls::start_some(tracefs, NAME, options, &numbers)
}

/// Records the calls of the scene's server, unless the server has timestamps of its own.
pub(super) fn in_scene(scene: &Scene) -> Option<Result<Box<dyn Collector>>> {
    let options = Options {
        threads: scene.serving,
        mode: scene.mode,
    };
    let is_told = scene.api.is_some();
    (!is_told).then(|| boxed(start(scene.tracefs, &options)))
}

/// Returns the server's threads to record: all except vCPUs.
pub fn threads_of(threads: &[Thread], server: u32) -> Vec<u32> {
    let serving = threads
        .iter()
        .filter(|thread| thread.pid == server && thread.role != Role::Vcpu);
    serving.map(|thread| thread.tid).collect()
}

/// Observed calls and interrupts of threads, which determine the roles of threads without
/// meaningful names. qemu-storage-daemon names no threads, and QEMU does only with
/// `debug-threads=on`.
#[derive(Clone, Debug, Default)]
pub struct Deeds(HashMap<u32, Deed>);

#[derive(Clone, Copy, Debug, Default)]
struct Deed {
    waits: bool,
    /// Whether the thread submits I/O to the kernel, or interrupts to the guest.
    serves: bool,
    sync: bool,
}

impl Deeds {
    /// Records an event of this collector, of the system call collector or of KVM's.
    pub fn add(&mut self, event: &Event) {
        let call = match event.kind {
            Kind::SysEnter => io_call(&event.args),
            Kind::KvmMsiSetIrq => None,
            _ => return,
        };
        let deed = self.0.entry(event.tid).or_default();
        deed.serves |= event.kind == Kind::KvmMsiSetIrq;
        if let Some(call) = call {
            deed.waits |= call.waits;
            deed.serves |= call.submits;
            deed.sync |= call.sync;
        }
    }

    /// Assigns roles to the server's threads of unknown role. A thread that waits for work and
    /// submits I/O or interrupts is an I/O thread. A thread that does synchronous I/O and never
    /// waits is in a pool.
    pub fn tell_roles(&self, threads: &mut [Thread], server: u32) {
        let unknown = |thread: &&mut Thread| thread.pid == server && thread.role == Role::Other;
        for thread in threads.iter_mut().filter(unknown) {
            match self.0.get(&thread.tid) {
                Some(deed) if deed.waits && deed.serves => thread.role = Role::Io,
                Some(deed) if deed.sync && !deed.waits => thread.role = Role::Pool,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(tid: u32, number: u64, to_submit: u64) -> Event {
        Event::new(0, Kind::SysEnter, 0, tid, &[number, 5, to_submit, 0, 0])
    }

    #[test]
    fn nameless_threads_are_told_by_what_they_do() {
        let thread = |pid, tid, role| Thread {
            pid,
            tid,
            name: "qemu-storage-da".into(),
            role,
            vcpu: None,
        };
        let mut threads = [
            thread(9, 9, Role::Main),
            thread(9, 10, Role::Other), // waits and submits
            thread(9, 11, Role::Other), // waits and sends interrupts
            thread(9, 12, Role::Other), // reads
            thread(9, 13, Role::Other), // only waits: it may be anything
            thread(8, 14, Role::Other), // another process's
        ];
        let interrupt = |tid| Event::new(0, Kind::KvmMsiSetIrq, 0, tid, &[1, 2]);
        let events = [
            call(9, 271, 0),
            call(9, 426, 1),
            call(10, 271, 0),
            call(10, 426, 1),
            call(11, 271, 0),
            interrupt(11),
            call(12, 17, 0),
            call(13, 271, 0),
            call(14, 271, 0),
            call(14, 209, 0),
        ];
        let mut deeds = Deeds::default();
        events.iter().for_each(|event| deeds.add(event));
        deeds.tell_roles(&mut threads, 9);
        let roles = threads.map(|thread| thread.role);
        use Role::{Io, Main, Other, Pool};
        assert_eq!(roles, [Main, Io, Io, Pool, Other, Other]);
    }
}
