//! The supervisor: the host of tenants' disks, with a process for each tenant. The supervisor has
//! the permissions, the names and the sockets. The supervisor maps no guest memory and reads no
//! image.
//!
//! - `process` starts a tenant's process, and `handle` is its pidfd;
//! - `gate` opens files for the process, which `permits` allows; `log` passes its log lines on;
//! - `tenant` is the state of a tenant: its disks, and the commands in progress;
//! - `users` chooses the user of the process, and `groups` enforces its limits;
//! - `asking` sends commands and receives replies, which `reply` checks; `listing` collects the
//!   replies of all tenants, and `relayed` checks events;
//! - `handover` hands the tenants over to another supervisor, and `renewal` replaces their
//!   processes, in `turns`.

mod asking;
mod gate;
mod groups;
mod handle;
mod handover;
mod listing;
mod log;
mod permits;
mod process;
mod relayed;
mod renewal;
mod reply;
mod tenant;
#[cfg(test)]
mod tests;
mod turns;
mod users;

use fathom_control::RequestError;
use fathom_host::handover::HandoverHost;
use fathom_host::link::FromTenant;
use fathom_host::options::ServeOptions;
use fathom_host::users::User;
use fathom_host::{Error, Host, Outcome, StopTimeout, Tenancy};
use fathom_metrics::Measures;
use fathom_metrics::{Events, Happened};
use fathom_requests::{Ask, Command, Reply, Responder, Shown};
use fathom_sandbox::Mode;
use fathom_sockets::{Bound, Listener};
use fathom_spec::PoolSpec;
use groups::Groups;
use listing::Listing;
use process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tenant::{Replacement, Said, Tenant};
use turns::Turns;
use users::Register;

/// Maximum number of messages, and of their bytes, that are read from a tenant before the next
/// tenant's turn.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 256 << 10;

/// Maximum pause of a handover in a reply, in milliseconds.
const MAX_PAUSE_MS: f64 = 1e6;

/// All tenants.
pub struct Tenants {
    all: BTreeMap<String, Tenant>,
    /// Tenants without disks, whose processes are ending, and when they are killed.
    leaving: Vec<(Tenant, Instant)>,
    /// Processes that were killed and may not have ended, with the names of their tenants.
    dying: Vec<(String, Process)>,
    /// Requests about all disks, in progress.
    listings: Vec<Listing>,
    pools: BTreeMap<String, PoolSpec>,
    events: Events,
    stop_timeout: StopTimeout,
    sandbox: Mode,
    users: Register,
    tenancy: Tenancy,
    groups: Groups,
    outcomes: Vec<(String, Outcome)>,
    /// Tenants whose processes are being replaced.
    renewing: Option<Turns>,
    /// Sockets of a predecessor, which the predecessor still owns.
    bounds: Vec<(Arc<Listener>, Bound)>,
}

impl Tenants {
    /// Creates the host of all disks of tenants, with no tenants yet.
    ///
    /// # Errors
    /// If the section `[tenants]` of the configuration is invalid.
    pub fn new(options: &ServeOptions) -> Result<Tenants, Error> {
        let bad = |problem| Error::Options(format!("[tenants]: {problem}"));
        options.tenancy.check().map_err(bad)?;
        let groups = Groups::new(&options.tenancy.allowances());
        Ok(Tenants::none(options, groups.map_err(bad)?))
    }

    fn none(options: &ServeOptions, groups: Groups) -> Tenants {
        let pools = options.pools.iter();
        let pools = pools.map(|pool| (pool.name.clone(), PoolSpec::of(pool)));
        Tenants {
            all: BTreeMap::new(),
            leaving: Vec::new(),
            dying: Vec::new(),
            listings: Vec::new(),
            pools: pools.collect(),
            events: options.events.clone(),
            stop_timeout: options.stop_timeout,
            sandbox: options.sandbox,
            users: Register::new(options.tenancy.users.clone()),
            tenancy: options.tenancy.clone(),
            groups,
            outcomes: Vec::new(),
            renewing: None,
            bounds: Vec::new(),
        }
    }

    /// The user of a new tenant's process.
    fn user_of(&mut self, name: &str) -> Result<Option<User>, String> {
        let leaving: BTreeSet<_> = self
            .leaving
            .iter()
            .map(|(tenant, _)| &*tenant.name)
            .collect();
        let has_process = |name: &str| self.all.contains_key(name) || leaving.contains(name);
        self.users.user_of(name, has_process)
    }

    fn is_all_settled(&self) -> bool {
        let is_settled = self.all.values().all(Tenant::is_settled);
        is_settled && self.leaving.is_empty() && self.renewing.is_none()
    }

    /// Replies to the requests about all disks that are complete or late.
    fn tell_listings(&mut self) {
        let now = Instant::now();
        self.listings.retain_mut(|listing| !listing.tell(now));
    }

    /// Handles the messages of a tenant, up to a limit. False: the process has ended.
    fn hear(&mut self, name: &str) -> bool {
        let mut bytes = 0;
        for _ in 0..BATCH {
            let Some(tenant) = self.all.get_mut(name) else {
                return false;
            };
            let Said { message, text } = match tenant.receive() {
                Ok(None) => return true,
                Ok(Some(said)) => said,
                Err(error) => {
                    tracing::debug!("tenant '{name}': {error}");
                    return false;
                }
            };
            bytes += text.len();
            match message {
                FromTenant::Answer { number, .. } => self.take_in(name, number, text),
                FromTenant::HandedOver { pause_ms } => {
                    if let Some(replacement) = &mut tenant.replacement {
                        replacement.pause_ms = Some(pause_ms.clamp(0.0, MAX_PAUSE_MS));
                    }
                }
                FromTenant::EndSuccessor => self.end_successor(name),
                FromTenant::Stays(problem) => self.keep(name, problem),
                FromTenant::Outcome(..) | FromTenant::Ended(_) | FromTenant::Serving => {}
            }
            if bytes > BATCH_BYTES {
                break;
            }
        }
        true
    }

    /// Kills a process, without waiting for its end.
    fn bury(&mut self, tenant: &str, mut process: Process) {
        process.kill();
        self.dying.push((tenant.to_owned(), process));
    }

    /// Reaps processes that were killed.
    fn notice_ends(&mut self) {
        for (name, mut process) in std::mem::take(&mut self.dying) {
            match process.kill() {
                true => {
                    let how = process.end();
                    tracing::debug!("a process of tenant '{name}' {how}");
                }
                false => self.dying.push((name, process)),
            }
        }
        for (name, tenant) in &mut self.all {
            if tenant.notice_end() {
                let tenant = name.clone();
                self.events.tell(Happened::Restarted { tenant });
            }
        }
    }

    /// Replies with an error to commands whose replies are late. With `all`, to every command.
    fn expire(&mut self, all: bool) {
        let now = Instant::now();
        let expired = self
            .all
            .values_mut()
            .map(|tenant| tenant.take_expired(now, all));
        let expired: Vec<_> = expired.flatten().collect();
        for asked in expired {
            self.give_up(asked);
        }
    }

    /// Kills tenants' processes that have not released a disk in time.
    fn end_overdue(&mut self) {
        let (now, patience) = (Instant::now(), self.stop_timeout.0 + tenant::MARGIN);
        let is_late = |(_, tenant): &(&String, &Tenant)| {
            let asked = tenant.is_to_let_go();
            asked.is_some_and(|at| at + patience <= now)
        };
        let late: Vec<_> = self
            .all
            .iter()
            .filter(is_late)
            .map(|(name, _)| name.clone())
            .collect();
        for name in late {
            tracing::error!("tenant '{name}' does not let go of a disk: its process is killed");
            self.take_up_again(&name);
        }
    }

    /// Handles the end of a tenant's process: its commands fail, and it is started again.
    fn take_up_again(&mut self, name: &str) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        let Some(process) = tenant.process.take() else {
            return;
        };
        match &tenant.replacement {
            None => self.start_after(name, process),
            Some(Replacement { process: None, .. }) => self.lose(name, process),
            // (The new process notices whether it has all disks, and serves or ends.)
            Some(_) => self.bury(name, process),
        }
    }

    /// Handles the end of a tenant's last process.
    fn start_after(&mut self, name: &str, process: Process) {
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        tenant.lose_process(process);
        if tenant.disks.is_empty() {
            let ending = tenant.stop_waiting_for_end();
            self.all.remove(name);
            self.dying
                .extend(ending.map(|process| (name.to_owned(), process)));
        }
    }

    fn start_again(&mut self) {
        let now = Instant::now();
        let due = |(_, tenant): &(&String, &Tenant)| tenant.restarts().is_some_and(|at| at <= now);
        let due: Vec<_> = self
            .all
            .iter()
            .filter(due)
            .map(|(name, _)| name.clone())
            .collect();
        for name in due {
            self.restore(&name);
        }
    }

    /// Removes leaving tenants whose processes have ended, and kills processes that are late.
    fn see_off(&mut self) {
        let now = Instant::now();
        let timeout = self.stop_timeout;
        for (mut tenant, until) in std::mem::take(&mut self.leaving) {
            let is_over = tenant.drain();
            if !is_over && until > now {
                self.leaving.push((tenant, until));
                continue;
            }
            let name = &tenant.name;
            if !is_over {
                tracing::error!("tenant '{name}' has not ended within {timeout}: it is killed");
            }
            let name = name.clone();
            for process in tenant.take_processes() {
                self.bury(&name, process);
            }
        }
    }
}

impl Host for Tenants {
    fn ask(&mut self, ask: Ask, responder: Responder) {
        self.forward(ask, responder);
    }

    fn list(&mut self, next: Box<dyn FnOnce(Vec<Shown>) + Send>) {
        let told = |replies: Vec<Reply>| {
            let shown = replies.into_iter().filter_map(|one| one.try_into().ok());
            next(shown.collect());
        };
        self.ask_all(Command::Show, Box::new(told));
    }

    fn measure_all(&mut self, responder: Box<dyn FnOnce(Measures) + Send>) {
        let told = |replies: Vec<Reply>| {
            let sent = replies.into_iter().filter_map(|sent| sent.try_into().ok());
            responder(Measures::OfTenants(sent.collect()));
        };
        self.ask_all(Command::Measure, Box::new(told));
    }

    fn events(&self) -> Vec<BorrowedFd<'_>> {
        let leaving = self.leaving.iter().map(|(tenant, _)| tenant);
        let replacements = self.all.values().filter_map(|one| one.replacement.as_ref());
        let replacements = replacements.filter_map(|one| one.process.as_ref());
        let all = self.all.values().chain(leaving);
        let links = all.filter_map(|tenant| tenant.process.as_ref());
        let ending = self.all.values().filter_map(Tenant::ending);
        let dying = self.dying.iter().map(|(_, process)| process);
        let all = links.chain(replacements).chain(ending).chain(dying);
        all.map(Process::event).collect()
    }

    fn patience(&self) -> Option<Duration> {
        let restarts = self.all.values().filter_map(Tenant::restarts);
        let replacements = self.all.values().filter_map(|one| one.replacement.as_ref());
        let replacements = replacements.map(|one| one.until);
        let renewing = self.renewing.as_ref().and_then(|turns| turns.until);
        let ends = self.leaving.iter().map(|(_, until)| *until);
        let lists = self.listings.iter().map(|listing| listing.until);
        let asked = self.all.values().filter_map(Tenant::is_to_let_go);
        let late = asked.map(|at| at + self.stop_timeout.0 + tenant::MARGIN);
        let renewals = replacements.chain(renewing);
        let expire = self.all.values().filter_map(Tenant::expires);
        let all = restarts.chain(ends).chain(lists).chain(late).chain(expire);
        let first = all.chain(renewals).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn turn(&mut self) -> bool {
        let running = self
            .all
            .iter()
            .filter(|(_, tenant)| tenant.process.is_some());
        let names: Vec<_> = running.map(|(name, _)| name.clone()).collect();
        for name in names {
            if !self.hear(&name) {
                self.take_up_again(&name);
            }
        }
        self.notice_ends();
        self.expire(false);
        self.go_on_renewing();
        self.end_overdue();
        self.start_again();
        self.see_off();
        self.tell_listings();
        true
    }

    fn describe(&self) -> Vec<String> {
        Vec::new()
    }

    fn names(&self) -> Vec<String> {
        self.disks().map(|disk| disk.table.name.clone()).collect()
    }

    fn set_stop_timeout(&mut self, timeout: StopTimeout) {
        self.stop_timeout = timeout;
    }

    /// Ends all tenants at the same time.
    fn stop(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + self.stop_timeout.0 + tenant::MARGIN;
        let mut late = Vec::new();
        for tenant in self.all.values_mut() {
            let listeners = tenant
                .disks
                .iter()
                .filter_map(|disk| disk.listener.as_ref());
            // Sockets are unbound before connections end, because front-ends reconnect at once.
            listeners.for_each(|listener| listener.unbind());
            tenant.begin_to_end();
        }
        let leaving = self.leaving.drain(..).map(|(tenant, _)| tenant);
        let mut processes: Vec<_> = self.dying.drain(..).collect();
        for mut tenant in std::mem::take(&mut self.all).into_values().chain(leaving) {
            while !tenant.drain() && wait(&tenant, deadline) {}
            self.outcomes.append(&mut tenant.outcomes);
            if !tenant.ended_well {
                late.push(format!("tenant '{}'", tenant.name));
            }
            let ended = tenant.take_processes().into_iter();
            processes.extend(ended.map(|process| (tenant.name.clone(), process)));
        }
        // (All are killed before the first wait, so that the total is the time of the slowest.)
        for (_, process) in &mut processes {
            process.kill();
        }
        let deadline = Instant::now() + handle::DIE;
        for (name, process) in processes {
            let how = process.end_by(deadline);
            tracing::debug!("tenant '{name}': its process {how}");
        }
        self.groups = Groups::default();
        match late.is_empty() {
            true => Ok(()),
            false => Err(Error::Abandoned {
                timeout: self.stop_timeout,
                whose: late.join(" and "),
            }),
        }
    }

    fn outcomes(&self) -> Vec<(String, Outcome)> {
        self.outcomes.clone()
    }

    fn is_settled(&self) -> bool {
        self.is_all_settled()
    }

    fn give_up_commands(&mut self) {
        self.expire(true);
        self.tell_listings();
        for (name, tenant) in &mut self.all {
            let ending = tenant.stop_waiting_for_end();
            self.dying
                .extend(ending.map(|process| (name.clone(), process)));
        }
    }

    fn handover_host(&mut self) -> Result<&mut dyn HandoverHost, RequestError> {
        Ok(self)
    }
}

/// Waits for a message. False: no message has arrived until `deadline`, or none will.
fn wait(tenant: &Tenant, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).ok().filter(|_| !left.is_zero());
    let (Some(left), Some(process)) = (left, &tenant.process) else {
        return false;
    };
    let mut fds = [PollFd::from_borrowed_fd(
        process.link.as_fd(),
        PollFlags::IN,
    )];
    poll(&mut fds, Some(&left)) != Ok(0)
}
