//! A tenant's process.

use super::gate::Gate;
use super::groups::Group;
use super::handle::{DIE, Handle};
use super::log::Log;
use super::permits::Permits;
use fathom_host::handover::ProcessState;
use fathom_host::link::{self, Link, ToTenant};
use fathom_metrics::Events;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub struct Process {
    handle: Handle,
    pub link: Link,
    pub gate: Gate,
    pub started: Instant,
    /// Version of the messages that the process sends on the link.
    link_version: u32,
    /// The process was killed, and may not have ended yet.
    is_killed: bool,
    /// The process's control group. None: it has no limits.
    pub group: Option<Arc<Group>>,
    /// Number of processes in that group that the kernel had killed when this process was started
    /// or taken over.
    kills: u64,
}

impl Process {
    /// Starts a process of this tenant, with `begin` as its first message. `predecessor`: a socket
    /// to the process that hands over its disks.
    pub fn start(
        name: &str,
        begin: &ToTenant,
        predecessor: Option<OwnedFd>,
        group: Option<Arc<Group>>,
        permits: Arc<Permits>,
        events: Events,
    ) -> io::Result<Process> {
        let (link, tenants_link) = Link::pair()?;
        let (gate, tenants_gate) = Link::pair()?;
        let (log, tenants_log) = Log::pipe()?;
        let child = Command::new("/proc/self/exe")
            // Tools that look for servers by the name of the program must not find this process.
            .arg0("fathom-tenant")
            .args(["tenant", name])
            .env_remove("NOTIFY_SOCKET")
            .stdin(tenants_link)
            .stdout(tenants_gate)
            .stderr(tenants_log)
            // Signals from a terminal, such as SIGINT, go to the supervisor alone.
            .process_group(0)
            .spawn()?;
        let process = Process {
            handle: Handle::of(child)?,
            link,
            gate: Gate::new(gate, Log::new(name, Some(log))),
            started: Instant::now(),
            link_version: link::VERSION,
            is_killed: false,
            kills: kills(group.as_deref()),
            group,
        };
        // The process has done nothing yet, because it waits for its first message.
        if let Some(group) = &process.group
            && let Err(error) = group.put(process.pid())
        {
            let how = process.end();
            let text = format!(
                "cannot put the process into its control group: {}; the process {how}",
                cause(error)
            );
            return Err(io::Error::other(text));
        }
        process.gate.open(name, permits, events)?;
        let predecessor = predecessor.as_ref().map(AsFd::as_fd);
        process.link.send(begin, predecessor, false)?;
        Ok(process)
    }

    pub fn pid(&self) -> u32 {
        self.handle.pid()
    }

    /// A file descriptor that is readable when there is a message on the link, or when a killed
    /// process has ended.
    pub fn event(&self) -> BorrowedFd<'_> {
        match self.is_killed {
            true => self.handle.as_fd(),
            false => self.link.as_fd(),
        }
    }

    pub fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// Kills the process without waiting. Returns whether the process has ended.
    pub fn kill(&mut self) -> bool {
        self.is_killed = true;
        self.handle.kill()
    }

    /// Kills the process unless it has ended, and waits for its end, at most for [`DIE`]. Returns
    /// how the process has ended.
    pub fn end(self) -> String {
        self.end_by(Instant::now() + DIE)
    }

    /// Kills the process, and waits for its end, at most until `deadline`. Returns how the process
    /// has ended.
    pub fn end_by(self, deadline: Instant) -> String {
        let how = self.handle.end(deadline);
        self.gate.finish();
        match kills(self.group.as_deref()) > self.kills {
            true => format!("{how}, because it needed more than its memory-max"),
            false => how,
        }
    }

    /// Returns the process's state for a successor of this supervisor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<ProcessState> {
        let (gate, log) = self.gate.hand_over(files)?;
        Ok(ProcessState {
            pid: self.pid(),
            link_version: self.link_version,
            lives_ms: self.started.elapsed().as_millis() as u64,
            pidfd: files.add(&self.handle)?,
            link: files.add(&self.link)?,
            gate,
            log,
            owes_answer: self.gate.owes_answer(),
        })
    }

    /// Takes over a process from a predecessor. No thread serves its gate yet.
    pub fn adopt(
        tenant: &str,
        state: &ProcessState,
        group: Option<Arc<Group>>,
        files: &mut Descriptors,
    ) -> Result<Process, String> {
        if !(link::OLDEST_VERSION..=link::VERSION).contains(&state.link_version) {
            return Err(format!(
                "the tenant's process uses protocol version {}, and this program version {}",
                state.link_version,
                link::VERSION
            ));
        }
        let gate: Link = files.take(state.gate)?.into();
        let log = state.log.map(|log| files.take(log)).transpose()?;
        let gate = Gate::new(gate, Log::new(tenant, log));
        if state.owes_answer {
            gate.answer_owed();
        }
        let now = Instant::now();
        let lives = Duration::from_millis(state.lives_ms);
        Ok(Process {
            handle: Handle::adopt(state.pid, files.take(state.pidfd)?),
            link: files.take(state.link)?.into(),
            gate,
            started: now.checked_sub(lives).unwrap_or(now),
            link_version: state.link_version,
            is_killed: false,
            kills: kills(group.as_deref()),
            group,
        })
    }
}

fn kills(group: Option<&Group>) -> u64 {
    group.map_or(0, Group::memory_kills)
}
