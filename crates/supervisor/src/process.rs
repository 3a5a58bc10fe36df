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
    /// Version of what it says on the link.
    link_version: u32,
    /// It was killed, and may not have ended yet.
    is_killed: bool,
    /// In which it is; None: it may use what there is.
    pub group: Option<Arc<Group>>,
    /// How many the kernel had killed there before.
    kills: u64,
}

impl Process {
    /// Start the process of this tenant, which begins by that; `predecessor`: at whose other end another
    /// one hands over.
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
            // Whoever looks for servers by their program's name does not mean this.
            .arg0("fathom-tenant")
            .args(["tenant", name])
            .env_remove("NOTIFY_SOCKET")
            .stdin(tenants_link)
            .stdout(tenants_gate)
            .stderr(tenants_log)
            // Whoever ends this process from its terminal does not mean them.
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
        // It has done nothing yet, and waits for its first message.
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

    /// Readable when there is something to do: a message on the link, or, of a process that was killed,
    /// its end.
    pub fn event(&self) -> BorrowedFd<'_> {
        match self.is_killed {
            true => self.handle.as_fd(),
            false => self.link.as_fd(),
        }
    }

    pub fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// Kills it without waiting. Whether it has ended.
    pub fn kill(&mut self) -> bool {
        self.is_killed = true;
        self.handle.kill()
    }

    /// Kills it and waits for its end for [`DIE`] at most, unless it has ended already. Says how it has
    /// ended.
    pub fn end(self) -> String {
        self.end_by(Instant::now() + DIE)
    }

    /// Likewise, until `deadline` at most.
    pub fn end_by(self, deadline: Instant) -> String {
        let how = self.handle.end(deadline);
        self.gate.finish();
        match kills(self.group.as_deref()) > self.kills {
            true => format!("{how}, because it needed more than its memory-max"),
            false => how,
        }
    }

    /// For a successor of this supervisor.
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

    /// One that a predecessor has started, or got itself; nobody is at its gate yet.
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
