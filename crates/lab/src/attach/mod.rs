//! A QEMU that runs already: its threads, its disks, who serves them and where their images lie,
//! found out from outside and without changing anything.
//!
//! What cannot be told for certain is left out and said: a disk whose kicks and interrupts cannot
//! be told from those of other devices is `unidentified`.

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

pub use debugfs::{TscOffset, guest_offset, tsc_offset};
pub use image::{Located, locate};
pub use join::join;
pub use process::{server_threads, threads_of};
pub use record::{Options, record};
pub use served::{Served, record_served};

/// A QEMU process and what belongs to it.
#[derive(Clone, Debug, Default)]
pub struct Qemu {
    pub pid: u32,
    /// Its threads, then those of its disks' servers.
    pub threads: Vec<Thread>,
    pub disks: Vec<Found>,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// As QEMU prints it; None without a monitor or a readable program file.
    pub version: Option<String>,
    /// What could not be found out, a line each.
    pub problems: Vec<String>,
}

/// A virtio-blk disk of QEMU's.
#[derive(Clone, Debug, Default)]
pub struct Found {
    pub disk: Disk,
    /// eventfds that QEMU shares with the disk's server and with no other: its kicks and calls.
    /// Which are which shows when they are used ([`Found::classify`], [`Found::called`]).
    pub eventfds: Vec<u64>,
    /// (file descriptor in the server, eventfd's id) of these.
    pub server_fds: Vec<(u64, u64)>,
    /// The vhost-user socket between the two.
    pub socket: Option<PathBuf>,
    /// The socket of a Fathom server's API.
    pub api: Option<PathBuf>,
    /// What the host's block layer sees of the image.
    pub located: Located,
    /// `threads`, `native` or `io_uring`, and QEMU's cache mode, where they are known.
    pub aio: Option<String>,
    pub cache: Option<String>,
}

impl Qemu {
    /// Looks at a process. `qmp` is a monitor socket of it that nobody else uses.
    ///
    /// # Errors
    /// When there is no such process, it is no QEMU, or only root may look at it.
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
            threads: threads_of(pid),
            accelerator: process::accelerator(pid, &parsed),
            version: process::qemu_version(pid),
            ..Qemu::default()
        };
        qemu.disks = disks::find(pid, &parsed, &mut qemu.problems)?;
        if let Some(socket) = qmp {
            let asked = monitor::ask(socket, &mut qemu);
            asked.unwrap_or_else(|error| qemu.problems.push(format!("QMP: {}", cause(error))));
        }
        let servers: Vec<u32> = qemu.servers();
        for server in servers {
            qemu.threads.extend(server_threads(server));
        }
        Ok(qemu)
    }

    /// Processes that serve its disks, itself excepted.
    pub fn servers(&self) -> Vec<u32> {
        let pids = self.disks.iter().filter_map(|found| found.disk.server_pid);
        let mut servers: Vec<u32> = pids.filter(|&pid| pid != self.pid).collect();
        servers.sort_unstable();
        servers.dedup();
        servers
    }

    /// The disk of this name, or the only one.
    ///
    /// # Errors
    /// The names there are, when none or several fit.
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
    /// Notes the disk's kicks: of the signalled eventfds (id, thread) those that are the disk's
    /// and were signalled by a vCPU.
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
        // QEMU makes a device's eventfds in the order of its queues.
        self.disk.kick_eventfds = kicks.into_iter().collect();
    }

    /// Notes the disk's calls: of the server's write(2)s (file descriptor, thread) those to an
    /// eventfd that it shares with QEMU and that is no kick.
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
        self.disk.call_eventfds = calls.into_iter().collect();
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
        let mut other = Found::default();
        other.classify(&threads, [(41, 2)].into_iter());
        assert_eq!(other.disk.identified_by, None);
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
