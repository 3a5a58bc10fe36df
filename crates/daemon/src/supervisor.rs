//! The supervisor's part: disks that are tenants', each of which has a process of its own. Here are the
//! rights, the names and the sockets; no guest's memory is mapped, and no image is looked into.
//!
//! - `process` starts a tenant's process, which `handle` is for the kernel;
//! - `gate` opens for it what it may have, and `permits` says what that is; `log` passes on what it says;
//! - `tenant` is what is known of one: its disks, and what it was asked;
//! - `users` is which user's its process is, and `groups` has it use no more than it may;
//! - `asking` sends commands there and takes the replies, which `reply` checks; `listing` puts several
//!   together, and `relayed` checks events;
//! - `handover` has the tenants go on under another supervisor, and `renewal` in other processes,
//!   by `turns`.

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

use crate::command::{Ask, Command};
use crate::error::Error;
use crate::handover::Estate;
use crate::host::Host;
use crate::link::FromTenant;
use crate::objects::Outcome;
use crate::options::ServeOptions;
use crate::reply::{Reply, Responder, Shown};
use crate::stop_timeout::StopTimeout;
use crate::tenancy::Tenancy;
use crate::users::User;
use fathom_control::RequestError;
use fathom_exports::{Bound, Listener};
use fathom_metrics::Measures;
use fathom_metrics::{Events, Happened};
use fathom_sandbox::Mode;
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

/// Messages of a tenant that are read before another tenant's, and bytes after which no more are.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 256 << 10;

/// The longest pause of a handover that is shown, in milliseconds.
const MAX_PAUSE_MS: f64 = 1e6;

/// All tenants.
pub struct Tenants {
    all: BTreeMap<String, Tenant>,
    /// Those that have no disks any more, and are ending.
    leaving: Vec<(Tenant, Instant)>,
    /// Processes that were killed and may not have ended, with the names of their tenants.
    dying: Vec<(String, Process)>,
    /// Who wants to know of all.
    listings: Vec<Listing>,
    pools: BTreeMap<String, PoolSpec>,
    events: Events,
    stop_timeout: StopTimeout,
    sandbox: Mode,
    users: Register,
    tenancy: Tenancy,
    groups: Groups,
    outcomes: Vec<(String, Outcome)>,
    /// Tenants that are to have other processes.
    renewing: Option<Turns>,
    /// Where a predecessor's sockets are, which are still its own.
    bounds: Vec<(Arc<Listener>, Bound)>,
}

impl Tenants {
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

    /// Who a tenant that comes is to be.
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

    /// Answers who asked for all disks and need not wait any longer.
    fn tell_listings(&mut self) {
        let now = Instant::now();
        self.listings.retain_mut(|listing| !listing.tell(now));
    }

    /// Take in what this tenant says, as far as it does not say more than others have time for; false:
    /// it has ended.
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

    /// Kills a process that nobody waits for.
    fn bury(&mut self, tenant: &str, mut process: Process) {
        process.kill();
        self.dying.push((tenant.to_owned(), process));
    }

    /// Takes note of processes that were killed and have ended.
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

    /// Commands whose replies do not come are answered by an error. With `all`, every command is.
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

    /// Tenants that keep a disk which was to be taken from them are ended.
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

    /// Its process has ended: whoever waits for it is told, and it is started again.
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
            // The successor knows what it has.
            Some(_) => self.bury(name, process),
        }
    }

    /// The last process of a tenant has ended.
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

    /// Those that were told to end, and have, or did not for too long.
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

    /// Each tenant ends by itself, at the same time as others.
    fn stop(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + self.stop_timeout.0 + tenant::MARGIN;
        let mut late = Vec::new();
        for tenant in self.all.values_mut() {
            let listeners = tenant
                .disks
                .iter()
                .filter_map(|disk| disk.listener.as_ref());
            // Before connections end: front-ends would come again at once.
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
        // All of them first: together they take no longer than the slowest.
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

    fn estate(&mut self) -> Result<&mut dyn Estate, RequestError> {
        Ok(self)
    }
}

/// False: nothing has come from it until `deadline`, or nothing will.
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
