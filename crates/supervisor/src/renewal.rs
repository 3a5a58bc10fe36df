//! Replaces tenants' processes by processes of this program, while guests run.
//!
//! ```text
//! old                        supervisor                        new
//!                            Begin, socket ──────────────────►
//!     ◄───────────── HandOver, socket
//!     ◄─────── messages of a handover between servers ───────►
//! HandedOver ─────────►                 ◄───────────── Serving
//! ```
//!
//! If the handover fails, the old process has the new one killed (`EndSuccessor`, `GoOn`), and
//! sends `Stays`. If the old process ends, the new one knows whether it has everything, and serves
//! or ends. Therefore the supervisor kills no process that could be the only one with the disks,
//! except after a timeout.

use super::Tenants;
use super::log::shown;
use super::permits::Permits;
use super::process::Process;
use super::tenant::{Replacement, Tenant};
use fathom_host::handover::{PATIENCE, Progress, Renewal};
use fathom_host::link::{FromTenant, ToTenant};
use fathom_units::cause;
use serde::de::IgnoredAny;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of tenants whose processes are replaced at the same time.
const AT_ONCE: usize = 4;
/// Timeout for replies to commands that were sent before a replacement.
const ANSWER: Duration = Duration::from_secs(10);
/// Time within which an old process must report its handover after the new one serves, or that it
/// continues after the new one has ended.
const FAREWELL: Duration = Duration::from_secs(5);

impl Tenants {
    /// Handles messages of the new processes, and begins further replacements.
    pub(super) fn go_on_renewing(&mut self) {
        let replaced = self.all.values().filter(|one| one.replacement.is_some());
        let names: Vec<_> = replaced.map(|tenant| tenant.name.clone()).collect();
        for name in names {
            self.hear_replacement(&name);
            self.look_at_replacement(&name);
        }
        while self.begin_next() {}
    }

    /// Begins the next replacement. Returns false if the next one must wait, or if no tenant is
    /// left.
    fn begin_next(&mut self) -> bool {
        let is_replaced = |tenant: &&Tenant| tenant.replacement.is_some();
        let count = self.all.values().filter(is_replaced).count();
        let Some(renewing) = &mut self.renewing else {
            return false;
        };
        let Some(name) = renewing.todo.front().cloned() else {
            if count == 0 {
                (renewing.tell)(Progress::Done);
                self.renewing = None;
            }
            return false;
        };
        if count >= AT_ONCE {
            return false;
        }
        let tenant = self.all.get(&name);
        let Some(tenant) = tenant.filter(|tenant| tenant.process.is_some()) else {
            // Without a process, the tenant's next process runs this program anyway.
            renewing.next();
            return true;
        };
        let now = Instant::now();
        if !tenant.is_settled() && *renewing.until.get_or_insert(now + ANSWER) > now {
            return false;
        }
        let begun = match tenant.is_settled() {
            true => {
                renewing.next();
                let begun = self.begin_to_replace(&name);
                begun.map_err(|error| format!("cannot start the new process: {}", cause(error)))
            }
            false => {
                renewing.next();
                Err("the old process did not respond to an earlier command".to_owned())
            }
        };
        if let Err(problem) = begun {
            self.tell_renewal(&name, Err(problem));
        }
        true
    }

    fn begin_to_replace(&mut self, name: &str) -> io::Result<()> {
        let Some(tenant) = self.all.get(name) else {
            return Ok(());
        };
        // The new process gets permissions of its own, for the disks' current options, not those of
        // the old process.
        let permits: Arc<Permits> = Arc::default();
        let there = tenant.disks.iter().filter(|disk| disk.is_there);
        there.for_each(|disk| permits.begin(&disk.table, disk.listener.clone()));
        let (old_end, new_end) = UnixStream::pair()?;
        let new = self.start(tenant, permits.clone(), Some(new_end.into()))?;
        let Some(tenant) = self.all.get_mut(name) else {
            return Ok(());
        };
        if let Some(old) = &tenant.process {
            let with = Some(old_end.as_fd());
            if let Err(error) = old.link.send(&ToTenant::HandOver, with, false) {
                new.end();
                return Err(error);
            }
        }
        tenant.replacement = Some(Replacement {
            process: Some(new),
            permits,
            until: Instant::now() + PATIENCE,
            serves: false,
            pause_ms: None,
            owes_go_on: false,
        });
        Ok(())
    }

    fn hear_replacement(&mut self, name: &str) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        let Some(replacement) = &mut tenant.replacement else {
            return;
        };
        let Some(mut process) = replacement.process.take() else {
            return;
        };
        if process.is_killed() {
            if !process.kill() {
                replacement.process = Some(process);
                return;
            }
            return self.bring_back(name, process);
        }
        match process.link.receive::<FromTenant<IgnoredAny>>(false) {
            Ok(received) => {
                replacement.process = Some(process);
                if let Some((FromTenant::Serving, _)) = received {
                    replacement.serves = true;
                    replacement.until = Instant::now() + FAREWELL;
                }
            }
            Err(error) => {
                tracing::debug!("tenant '{name}': new process: {}", cause(error));
                process.kill();
                replacement.process = Some(process);
            }
        }
    }

    /// Handles the end of a new process: the old process continues, if it has not ended.
    fn bring_back(&mut self, name: &str, new: Process) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        if tenant.process.is_none() {
            return self.lose(name, new);
        }
        let how = new.end();
        tracing::warn!("tenant '{name}': its new process {how}; the old process continues");
        let Some(replacement) = &mut tenant.replacement else {
            return;
        };
        replacement.until = Instant::now() + FAREWELL;
        if std::mem::take(&mut replacement.owes_go_on) {
            tenant.tell(&ToTenant::GoOn);
        }
    }

    /// Takes the next step of a replacement, or waits.
    fn look_at_replacement(&mut self, name: &str) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        let Some(replacement) = &mut tenant.replacement else {
            return;
        };
        let is_late = replacement.until <= Instant::now();
        let is_alone = tenant.process.is_none() || replacement.pause_ms.is_some();
        match (&tenant.process, replacement.process.take()) {
            (_, Some(new)) if !new.is_killed() && replacement.serves && (is_alone || is_late) => {
                self.replace(name, new);
            }
            (_, Some(new)) if !is_late => replacement.process = Some(new),
            (Some(_), Some(mut new)) => {
                replacement.until = Instant::now() + FAREWELL;
                tracing::error!("tenant '{name}': its new process took too long and is killed");
                // The old process continues after the new one has ended.
                new.kill();
                replacement.process = Some(new);
            }
            (None, Some(new)) => self.lose(name, new),
            (_, None) if is_late => {
                let text = "the old process did not report whether it has handed over";
                self.keep(name, text.into());
            }
            (_, None) => {}
        }
    }

    /// Completes a replacement: the new process serves the disks.
    fn replace(&mut self, name: &str, new: Process) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        let Some(replacement) = tenant.replacement.take() else {
            return;
        };
        let there = tenant.disks.iter().filter(|disk| disk.is_there);
        there.for_each(|disk| replacement.permits.seal(&disk.table.name));
        tenant.permits = replacement.permits;
        let old = tenant.process.replace(new);
        tenant.ask_what_waited();
        if let Some(old) = old {
            self.bury(name, old);
        }
        self.tell_renewal(name, Ok(replacement.pause_ms.unwrap_or_default()));
    }

    /// Gives a replacement up: the old process continues, and the new one is killed.
    pub(super) fn keep(&mut self, name: &str, problem: String) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        let Some(replacement) = tenant.replacement.take() else {
            return;
        };
        tenant.ask_what_waited();
        if let Some(new) = replacement.process {
            self.bury(name, new);
        }
        self.tell_renewal(name, Err(problem));
    }

    /// Kills the new process, at the request of the old one.
    pub(super) fn end_successor(&mut self, name: &str) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        let Some(replacement) = &mut tenant.replacement else {
            return tenant.tell(&ToTenant::GoOn);
        };
        let Some(new) = &mut replacement.process else {
            return tenant.tell(&ToTenant::GoOn);
        };
        // The old process gets the reply when the new one has ended.
        new.kill();
        replacement.owes_go_on = true;
        replacement.until = Instant::now() + FAREWELL;
    }

    /// Handles the end of both processes. `last` is the process that ended last.
    pub(super) fn lose(&mut self, name: &str, last: Process) {
        if let Some(tenant) = self.all.get_mut(name) {
            tenant.replacement = None;
            self.start_after(name, last);
            let text = "both processes have ended; the new program restarts the tenant";
            self.tell_renewal(name, Err(text.into()));
        }
    }

    fn tell_renewal(&mut self, name: &str, outcome: Result<f64, String>) {
        let process = self.all.get(name).and_then(|one| one.process.as_ref());
        let pid = process.map(Process::pid);
        match (&outcome, pid) {
            (Ok(pause), Some(pid)) => tracing::info!(
                "tenant '{name}': process {pid} has taken over; queues stood still for \
                 {pause:.1} ms"
            ),
            (Ok(_), None) => {}
            (Err(problem), _) => {
                // The text may come from the tenant.
                let problem = shown(problem);
                tracing::error!("tenant '{name}': not handed over: {problem}");
            }
        }
        if let Some(renewing) = &mut self.renewing {
            let tenant = name.to_owned();
            (renewing.tell)(Progress::Tenant(Renewal {
                tenant,
                pid,
                outcome,
            }));
        }
    }
}
