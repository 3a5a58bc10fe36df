//! Inspects a running QEMU from outside, without changing it: its threads, its disks, their servers
//! and the locations of their images.
//!
//! Uncertain facts are left out and reported. If a disk's kicks and interrupts cannot be
//! distinguished from those of other devices, the disk is `unidentified`.

mod debugfs;
mod disks;
mod eventfds;
mod extents;
mod image;
mod join;
mod monitor;
mod options;
mod process;
mod record;
mod served;
mod sockets;
mod window;

use fathom_units::cause;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fathom_run::{Disk, Role, Thread};

use crate::error::{Error, Result};

pub use debugfs::{TscOffset, guest_offset, tsc_offsets};
pub(crate) use disks::{ServerOf, server_of};
pub use image::{Located, locate};
pub use join::join;
pub use process::{server_threads, threads_of};
pub use record::{Options, record};
pub use served::{Served, record_served};

/// A QEMU process with its threads and disks.
#[derive(Clone, Debug, Default)]
pub struct Qemu {
    /// Process id of QEMU.
    pub pid: u32,
    /// QEMU's threads, followed by those of its disks' servers.
    pub threads: Vec<Thread>,
    /// virtio-blk disks of QEMU.
    pub disks: Vec<Found>,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Version as QEMU prints it. `None` without a monitor or a readable program file.
    pub version: Option<String>,
    /// Facts that could not be determined, one line each.
    pub problems: Vec<String>,
}

/// A virtio-blk disk of QEMU.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Disk as a run directory describes it.
    pub disk: Disk,
    /// eventfds that QEMU shares only with the disk's server: its kicks and calls.
    /// [`Found::classify`] finds the kicks among them by their use, and [`Found::called`] the
    /// calls.
    pub eventfds: Vec<u64>,
    /// Number of the disk's queues that run. `None` if it is not known.
    pub queues: Option<usize>,
    /// Pairs of (file descriptor in the server, id) of these eventfds.
    pub server_fds: Vec<(u64, u64)>,
    /// The vhost-user socket between QEMU and the server.
    pub socket: Option<PathBuf>,
    /// Path of a Fathom server's API socket.
    pub api: Option<PathBuf>,
    /// Location of the image on the host's block devices.
    pub located: Located,
    /// Whether each byte of the disk is the byte of the image at the same offset, so that the
    /// disk's extents are the image's.
    pub is_flat: bool,
    /// `threads`, `native` or `io_uring`, if it is known.
    pub aio: Option<String>,
    /// QEMU's cache mode (`none`, `writeback`, ...), if it is known.
    pub cache: Option<String>,
}

impl Qemu {
    /// Inspects a process. `qmp` is one of its monitor sockets that no other program uses.
    ///
    /// # Errors
    /// When the process does not exist or is not QEMU, or only root may inspect it.
    pub fn inspect(pid: u32, qmp: Option<&Path>) -> Result<Qemu> {
        let arguments = process::arguments(pid)?;
        if !options::is_qemu(&arguments) {
            return Err(Error::Protocol(format!(
                "process {pid} is no QEMU system emulator (it is {})",
                arguments.first().map_or("unknown", String::as_str)
            )));
        }
        let parsed = options::parse(&arguments);
        let mut qemu = Qemu {
            pid,
            accelerator: process::accelerator(pid, &parsed),
            version: process::qemu_version(pid),
            ..Qemu::default()
        };
        qemu.disks = disks::find(pid, &parsed, &mut qemu.problems)?;
        if let Some(socket) = qmp {
            let asked = monitor::ask(socket, &mut qemu);
            asked.unwrap_or_else(|error| qemu.problems.push(format!("QMP: {}", cause(error))));
        }
        qemu.look_at_threads();
        Ok(qemu)
    }

    /// Updates the list of threads of QEMU and of its disks' servers. Pools start threads when they
    /// have work.
    ///
    /// Threads that have ended since are kept, and so are the known roles of the others.
    pub fn look_at_threads(&mut self) {
        let mut now = threads_of(self.pid);
        for server in self.servers() {
            now.extend(server_threads(server));
        }
        for new in now.iter_mut().filter(|new| new.role == Role::Other) {
            if let Some(old) = self.threads.iter().find(|old| old.tid == new.tid) {
                new.role = old.role;
            }
        }
        self.threads
            .retain(|old| now.iter().all(|new| new.tid != old.tid));
        self.threads.append(&mut now);
    }

    /// Returns the processes that serve QEMU's disks, without QEMU itself.
    pub fn servers(&self) -> Vec<u32> {
        let pids = self.disks.iter().filter_map(|found| found.disk.server_pid);
        let mut servers: Vec<u32> = pids.filter(|&pid| pid != self.pid).collect();
        servers.sort_unstable();
        servers.dedup();
        servers
    }

    /// Returns the index of the disk with this name, or of the only disk.
    ///
    /// # Errors
    /// The names of the disks, if none or several match.
    pub fn choose(&self, name: Option<&str>) -> Result<usize> {
        let names = || {
            let names: Vec<&str> = self
                .disks
                .iter()
                .map(|one| one.disk.name.as_str())
                .collect();
            names.join(", ")
        };
        match (name, self.disks.len()) {
            (_, 0) => Err(Error::Protocol(format!(
                "QEMU {} has no virtio-blk disk on its command line; with --qmp SOCKET those that \
                 were plugged in are found, too",
                self.pid
            ))),
            (None, 1) => Ok(0),
            (None, _) => Err(Error::Protocol(format!(
                "QEMU {} has several disks: choose one with --disk: {}",
                self.pid,
                names()
            ))),
            (Some(name), _) => {
                let found = self.disks.iter().position(|one| one.disk.name == name);
                found.ok_or_else(|| {
                    Error::Protocol(format!("QEMU has no disk {name}; it has {}", names()))
                })
            }
        }
    }
}

impl Found {
    /// Adds to the disk's extents what the file system has allocated since they were read. Returns
    /// a problem if the places of the image's bytes are no longer known.
    pub fn look_at_extents(&mut self) -> Option<String> {
        let image = self.disk.image.as_ref().filter(|_| self.is_flat)?;
        let now = image::extents_since(image, &self.disk.extents);
        let problem = now.as_ref().err().cloned();
        self.disk.extents = now.unwrap_or_default();
        self.is_flat = problem.is_none();
        problem.map(|problem| format!("{}: {problem}", self.disk.name))
    }

    /// Stores the disk's kicks: the signalled eventfds (id, thread) that belong to the disk and
    /// were signalled by a vCPU.
    pub fn classify(&mut self, threads: &[Thread], signals: impl Iterator<Item = (u64, u32)>) {
        let is_vcpu = |tid| {
            let mut vcpus = threads.iter().filter(|one| one.role == Role::Vcpu);
            vcpus.any(|one| one.tid == tid)
        };
        let ours = signals.filter(|&(id, tid)| self.eventfds.contains(&id) && is_vcpu(tid));
        let kicks: BTreeSet<u64> = ours.map(|(id, _)| id).collect();
        if !kicks.is_empty() {
            self.disk.identified_by = Some("eventfd-id".into());
        }
        // QEMU creates a device's eventfds in the order of its queues, so the ids have that order.
        // Without the kicks of idle queues, the places of the others are not their numbers.
        self.disk.queues_unknown = !kicks.is_empty() && self.queues != Some(kicks.len());
        self.disk.kick_eventfds = kicks.into_iter().collect();
    }

    /// Returns why the queues of the disk's kicks are not known, or `None` if they are known.
    pub fn queue_problem(&self) -> Option<String> {
        let queues = match self.queues {
            Some(queues) => queues.to_string(),
            None => "an unknown number".into(),
        };
        self.disk.queues_unknown.then(|| {
            format!(
                "{}: kicks of {} queues of {queues} were seen: the queue of each kick and interrupt \
                 is not known",
                self.disk.name,
                self.disk.kick_eventfds.len()
            )
        })
    }

    /// Stores the disk's calls: the eventfds that the server shares with QEMU, has written to, and
    /// that are not kicks. `writes` are pairs of (file descriptor, thread).
    pub fn called(&mut self, threads: &[Thread], writes: impl Iterator<Item = (u64, u32)>) {
        let server = self.disk.server_pid;
        let is_server = |tid| {
            let mut own = threads.iter().filter(|one| Some(one.pid) == server);
            own.any(|one| one.tid == tid)
        };
        let id_of = |fd: u64| {
            self.server_fds
                .iter()
                .find(|one| one.0 == fd)
                .map(|one| one.1)
        };
        let ids = writes
            .filter(|&(_, tid)| is_server(tid))
            .filter_map(|(fd, _)| id_of(fd));
        let calls: BTreeSet<u64> = ids
            .filter(|id| !self.disk.kick_eventfds.contains(id))
            .collect();
        let is_whole = calls.len() == self.disk.kick_eventfds.len();
        if is_whole || self.disk.queues_unknown {
            self.disk.call_eventfds = calls.into_iter().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(pid: u32, tid: u32, role: Role) -> Thread {
        Thread {
            pid,
            tid,
            name: String::new(),
            role,
            vcpu: None,
        }
    }

    #[test]
    fn kicks_and_calls_are_told_by_who_uses_them() {
        let threads = [
            thread(1, 1, Role::Main),
            thread(1, 2, Role::Vcpu),
            thread(9, 9, Role::Io),
        ];
        let mut found = Found {
            eventfds: vec![40, 41, 42],
            server_fds: vec![(5, 40), (6, 41), (7, 42)],
            queues: Some(1),
            ..Found::default()
        };
        found.disk.server_pid = Some(9);
        let signals = [(41, 2), (42, 9), (50, 2), (41, 2), (40, 77), (42, 1)];
        found.classify(&threads, signals.into_iter());
        let writes = [(7, 9), (6, 9), (1, 9), (5, 2), (7, 9)];
        found.called(&threads, writes.into_iter());
        assert_eq!(found.disk.kick_eventfds, [41]);
        assert_eq!(found.disk.call_eventfds, [42]);
        assert_eq!(found.disk.identified_by.as_deref(), Some("eventfd-id"));
        assert_eq!(found.queue_problem(), None);
        let mut other = Found::default();
        other.classify(&threads, [(41, 2)].into_iter());
        assert_eq!(other.disk.identified_by, None);
    }

    /// Queue 0 of two is idle: the only kick that is seen is queue 1's.
    #[test]
    fn idle_queues_leave_the_numbers_of_the_others_open() {
        let threads = [thread(1, 2, Role::Vcpu), thread(9, 9, Role::Io)];
        for queues in [Some(2), None] {
            let mut found = Found {
                eventfds: vec![40, 41, 42, 43],
                server_fds: vec![(5, 40), (6, 41), (7, 42), (8, 43)],
                queues,
                ..Found::default()
            };
            found.disk.server_pid = Some(9);
            found.classify(&threads, [(41, 2)].into_iter());
            assert!(found.disk.queues_unknown && found.queue_problem().is_some());
            found.classify(&threads, [(41, 2), (40, 2)].into_iter());
            assert_eq!(found.disk.queues_unknown, queues.is_none());
            // Only one of two calls was seen.
            found.called(&threads, [(8, 9)].into_iter());
            assert_eq!(found.disk.call_eventfds.is_empty(), queues.is_some());
        }
    }

    #[test]
    fn a_disk_is_chosen_by_name_or_by_being_the_only_one() {
        let found = |name: &str| Found {
            disk: Disk {
                name: name.into(),
                ..Disk::default()
            },
            ..Found::default()
        };
        let mut qemu = Qemu {
            disks: vec![found("a")],
            ..Qemu::default()
        };
        assert_eq!(qemu.choose(None).unwrap(), 0);
        qemu.disks.push(found("b"));
        assert_eq!(qemu.choose(Some("b")).unwrap(), 1);
        assert!(
            qemu.choose(None)
                .unwrap_err()
                .to_string()
                .contains("--disk: a, b")
        );
        assert!(qemu.choose(Some("c")).is_err());
    }
}
