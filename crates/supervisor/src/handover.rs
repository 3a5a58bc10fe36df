//! Hands tenants over from one supervisor to another, while the tenants' processes continue.

use super::Tenants;
use super::groups::Groups;
use super::process::Process;
use super::tenant::{Disk, Tenant};
use super::turns::Turns;
use fathom_exports::nbd::ClientState;
use fathom_host::handover::{
    Given, GroupsState, HandoverHost, Progress, State, TenantDisk, TenantState, VERSION,
};
use fathom_host::options::ServeOptions;
use fathom_metrics::DiskCounts;
use fathom_sockets::{Bound, Descriptors, Listener};
use fathom_units::cause;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time within which requests that tenants have made should be completed before a handover.
const HOLD: Duration = Duration::from_secs(2);

impl Tenants {
    /// Takes over the tenants of a predecessor, which owns their sockets and groups until
    /// [`HandoverHost::own`].
    pub fn adopt(
        options: &ServeOptions,
        tenants: Vec<TenantState>,
        groups: Vec<GroupsState>,
        files: &mut Descriptors,
    ) -> Result<Tenants, String> {
        let groups = Groups::adopt(groups, files)?;
        let mut all = Tenants::none(options, groups);
        let checked = options.tenancy.check();
        let checked = checked.and_then(|()| all.groups.extend(&options.tenancy.allowances()));
        checked.map_err(|problem| format!("[tenants]: {problem}"))?;
        for TenantState { name, user, .. } in &tenants {
            all.users.keep(name, *user);
        }
        for state in tenants {
            let name = state.name.clone();
            let adopted = all.adopt_one(state, files);
            let tenant = adopted.map_err(|problem| format!("tenant '{name}': {problem}"))?;
            all.all.insert(name, tenant);
        }
        Ok(all)
    }

    fn adopt_one(&mut self, state: TenantState, files: &mut Descriptors) -> Result<Tenant, String> {
        // The process keeps its user, and its replacement gets the user that this program's options
        // choose.
        let user = self.user_of(&state.name)?;
        let mut tenant = Tenant::new(state.name, user);
        let process = state.process;
        let group = self.groups.adopt_group(&tenant.name);
        let process = process.map(|one| Process::adopt(&tenant.name, &one, group, files));
        tenant.process = process.transpose()?;
        for state in state.disks {
            let adopted = state.listener.map(|one| Listener::adopt(one, files));
            let listener = adopted.transpose()?.map(|(listener, bound)| {
                let listener = Arc::new(listener);
                self.bounds.push((listener.clone(), bound));
                listener
            });
            let permits = &tenant.permits;
            permits.resume(&state.table, listener.clone(), state.found);
            tenant.disks.push(Disk {
                table: state.table,
                listener,
                is_there: state.is_there,
                // (Another version of the program may have used another format.)
                shown: serde_json::from_value(state.shown).ok(),
            });
        }
        if tenant.disks.iter().any(|disk| !disk.is_there) {
            tenant.restart = Some(Instant::now());
        }
        Ok(tenant)
    }

    fn give_all(&self, files: &mut Descriptors) -> io::Result<Vec<TenantState>> {
        let tenants = self.all.values();
        let given = tenants.map(|tenant| {
            let process = tenant.process.as_ref();
            let process = process.map(|process| process.hand_over(files));
            let process = process.transpose()?;
            let disks = tenant.disks.iter().map(|disk| {
                let listener = disk.listener.as_ref().map(|one| one.hand_over(files));
                Ok(TenantDisk {
                    table: disk.table.clone(),
                    listener: listener.transpose()?,
                    is_there: disk.is_there,
                    found: tenant.permits.found(&disk.table.name),
                    shown: serde_json::to_value(&disk.shown)?,
                })
            });
            Ok(TenantState {
                name: tenant.name.clone(),
                user: tenant.user,
                process,
                disks: disks.collect::<io::Result<_>>()?,
            })
        });
        given.collect()
    }

    fn processes(&self) -> impl Iterator<Item = (&str, &Process)> {
        let all = self.all.values();
        all.filter_map(|tenant| Some((&*tenant.name, tenant.process.as_ref()?)))
    }
}

impl HandoverHost for Tenants {
    /// Always succeeds: disks of all kinds stay in the tenants' processes.
    fn may_be_handed_over(&self) -> Result<(), String> {
        Ok(())
    }

    /// (Tenants' disks have no NBD exports.)
    fn let_encrypted_end(&mut self, _: bool) {}

    fn give(&self) -> Result<Given, String> {
        if !self.is_all_settled() {
            return Err("a command to a tenant is in progress; retry when it has completed".into());
        }
        let deadline = Instant::now() + HOLD;
        for (name, process) in self.processes() {
            process.gate.hold(deadline);
            if process.gate.owes_answer() {
                tracing::warn!(
                    "tenant '{name}': its process waits for a file that does not open; its \
                     request fails, and the process retries"
                );
            }
        }
        let mut files = Descriptors::default();
        let failed = |error| format!("cannot duplicate a file descriptor: {}", cause(error));
        let tenants = self.give_all(&mut files).map_err(failed)?;
        let groups = self.groups.hand_over(&mut files).map_err(failed)?;
        let state = State {
            version: VERSION,
            pid: std::process::id(),
            files: files.len(),
            disks: Vec::new(),
            origins: BTreeMap::new(),
            definitions: None,
            nbd: Vec::new(),
            api: None,
            kept: None,
            uptime_ms: 0,
            tenants: Some(tenants),
            groups,
        };
        Ok(Given {
            state,
            files,
            disks: Vec::new(),
        })
    }

    fn flush_early(&self) {}

    fn hold_clients(&self, _: Instant) -> Result<(Vec<ClientState>, Descriptors), String> {
        Ok(Default::default())
    }

    fn adopt_clients(&self, _: Vec<ClientState>, _: &mut Descriptors) -> Result<(), String> {
        Ok(())
    }

    fn take_back(&self) {
        let processes = self.processes();
        processes.for_each(|(_, process)| process.gate.go_on());
    }

    /// (Each tenant's process has its own counters.)
    fn counts(&self) -> Vec<DiskCounts> {
        Vec::new()
    }

    fn continue_counts(&mut self, _: &[DiskCounts]) {}

    fn own(&mut self, _: Vec<Bound>) {
        for (listener, bound) in self.bounds.drain(..) {
            listener.own(bound);
        }
        self.groups.own();
        for tenant in self.all.values() {
            let Some(process) = &tenant.process else {
                continue;
            };
            let (permits, events) = (tenant.permits.clone(), self.events.clone());
            if let Err(error) = process.gate.open(&tenant.name, permits, events) {
                // The process notices when it needs a file.
                tracing::error!(
                    "tenant '{}': cannot serve its process, which can open no more files: {}",
                    tenant.name,
                    cause(error)
                );
            }
        }
    }

    fn renew(&mut self, tell: Box<dyn FnMut(Progress) + Send>) {
        let todo = self.processes().map(|(name, _)| name.to_owned()).collect();
        self.renewing = Some(Turns::new(todo, tell));
        self.go_on_renewing();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_host::handover::ProcessState;
    use fathom_host::link;
    use fathom_host::options::DiskOptions;
    use fathom_spec::DiskSpec;
    use std::fs::File;

    /// The error comes before anything has changed.
    #[test]
    fn a_tenant_that_speaks_otherwise_is_refused() {
        let table: DiskSpec =
            serde_json::from_str(r#"{"name": "a", "image": "null:1M", "nbd": true}"#).unwrap();
        let disk = DiskOptions::of(table, true).unwrap();
        let options = ServeOptions::of(disk);
        let adopt = |link_version| {
            let mut files = Descriptors::default();
            let null = || File::open("/dev/null").unwrap();
            let [pidfd, link, gate] = [(); 3].map(|()| files.add(null()).unwrap());
            let process = ProcessState {
                pid: 1,
                link_version,
                lives_ms: 0,
                pidfd,
                link,
                gate,
                log: None,
                owes_answer: false,
            };
            let tenant = TenantState {
                name: "vm".into(),
                user: None,
                process: Some(process),
                disks: Vec::new(),
            };
            Tenants::adopt(&options, vec![tenant], Vec::new(), &mut files).map(drop)
        };
        assert_eq!(adopt(link::VERSION), Ok(()));
        let problem = adopt(link::VERSION + 1).unwrap_err();
        assert!(problem.starts_with("tenant 'vm': the tenant's process uses protocol version"));
    }
}
