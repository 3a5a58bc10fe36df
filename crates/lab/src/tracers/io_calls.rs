//! What a disk's server without stamps of its own asks of the kernel: when it waits for work, and
//! when it hands on I/O. From that, a report tells when the server woke, submitted and had its
//! result.

use std::collections::HashMap;

use fathom_run::{Event, IO_CALLS, Kind, Role, Thread, io_call};

use super::scene::Scene;
use super::syscalls::{self, Syscalls};
use super::{Collector, Tracefs, boxed};
use crate::error::Result;

pub use super::syscalls::Options;

/// The name of the file, and in a round's list.
pub const NAME: &str = "io-calls";

/// Starts to record these calls of the server's threads.
///
/// # Errors
/// When the kernel does not trace system calls, or the threads are our own.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Syscalls> {
    let numbers: Vec<u64> = IO_CALLS.iter().map(|(number, _)| *number).collect();
    syscalls::start_some(tracefs, NAME, options, &numbers)
}

/// Of a server that has no stamps of its own.
pub(super) fn in_scene(scene: &Scene) -> Option<Result<Box<dyn Collector>>> {
    let options = Options {
        threads: scene.serving,
        mode: scene.mode,
    };
    let is_told = scene.api.is_some();
    (!is_told).then(|| boxed(start(scene.tracefs, &options)))
}

/// The threads of a server that are worth watching: all but vCPUs.
pub fn threads_of(threads: &[Thread], server: u32) -> Vec<u32> {
    let serving = threads
        .iter()
        .filter(|thread| thread.pid == server && thread.role != Role::Vcpu);
    serving.map(|thread| thread.tid).collect()
}

/// What threads were seen to do. By that those are told whose names say nothing
/// (qemu-storage-daemon gives its threads none, QEMU without `debug-threads=on`).
#[derive(Clone, Debug, Default)]
pub struct Deeds(HashMap<u32, Deed>);

#[derive(Clone, Copy, Debug, Default)]
struct Deed {
    waits: bool,
    /// It hands I/O to the kernel, or interrupts to the guest.
    serves: bool,
    sync: bool,
}

impl Deeds {
    /// Notes an event of this collector's, of the system calls' or of KVM's.
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

    /// Gives a server's threads of unknown role theirs: one that waits for work and submits I/O or
    /// sends interrupts is an I/O thread, one that does I/O and waits for nothing is of a pool.
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
