//! Adds and changes disks.

use super::{Registry, log, not_served, reply};
use crate::condition::Condition;
use crate::definition::Definition;
use crate::entry::{AfterWrite, Presence, Putting, Requester, Work};
use crate::error::{ErrorKind, RequestError};
use crate::event::{Done, Effect, HostRequest, Level};
use crate::request::Reply;
use fathom_spec::DiskSpec;
use std::collections::BTreeSet;
use std::time::Duration;

/// Pause between attempts to open a disk: the first, and the maximum.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

impl Registry {
    /// Begins a request to add or change a disk.
    ///
    /// A static disk is changed only until the server restarts, and keeps the options that the
    /// request does not name.
    #[allow(clippy::too_many_arguments, reason = "the members of a request")]
    pub(super) fn begin_put(
        &mut self,
        name: &str,
        by: Requester,
        mut spec: DiskSpec,
        named: Option<BTreeSet<String>>,
        until_restart: bool,
        only_if: Condition,
        out: &mut Vec<Effect>,
    ) {
        if let Err(error) = self.check_put(name, &mut spec, &only_if, out) {
            return reply(by, name, Err(error), out);
        }
        let is_static = self.entry(name).is_static();
        let is_written = !is_static && !until_restart && self.settings.disks_dir.is_some();
        let owner = match (is_static, is_written) {
            (true, _) => Definition::Static,
            (false, true) => {
                Definition::Persistent(Box::new(spec.clone().without_defaults().with_format()))
            }
            (false, false) => Definition::Transient,
        };
        let request = HostRequest::Put {
            spec: Box::new(spec),
            named: named.filter(|_| is_static),
            only_if,
        };
        let putting = Putting {
            by,
            owner,
            is_written,
        };
        self.ask(name, request, Work::Putting(putting), out);
    }

    fn check_put(
        &mut self,
        name: &str,
        spec: &mut DiskSpec,
        only_if: &Condition,
        out: &mut Vec<Effect>,
    ) -> Result<(), RequestError> {
        let entry = self.entry(name);
        if let Some(problem) = &entry.conflict {
            return Err(not_served(name, problem));
        }
        if let Presence::Failed { problem, .. } = &entry.presence
            && only_if.rules_out_existing()
        {
            return Err(ErrorKind::Exists.because(format!(
                "a disk named '{name}' already exists, but is not served: {problem}; use 'fathom \
                 disk change', or choose another name"
            )));
        }
        self.check_data(name, spec)?;
        let entry = self.entry(name);
        match entry.is_served() || entry.is_static() {
            true => Ok(()),
            false => self.do_not_export_unasked(name, spec, out),
        }
    }

    /// Rejects a disk on an image other than the one in its definition.
    ///
    /// After a restart, the disk would be on the defined image again.
    fn check_data(&self, name: &str, spec: &DiskSpec) -> Result<(), RequestError> {
        let Some(entry) = { self.entries.get(name) }.filter(|entry| !entry.is_served()) else {
            // For a served disk, the host compares the images.
            return Ok(());
        };
        let (defined, place) = match (&entry.owner, &entry.declared) {
            (Some(Definition::Persistent(stored)), _) => {
                (stored, format!("by {}", self.file_of(name)))
            }
            (Some(Definition::Static), Some(declared)) => (declared, self.place_of(name)),
            _ => return Ok(()),
        };
        let new = spec.clone().without_defaults();
        let keys = defined.clone().without_defaults().other_data(&new);
        match keys.is_empty() {
            true => Ok(()),
            false => Err(ErrorKind::Conflict.because(format!(
                "disk '{name}': defined {place} with other options ({}); change that definition, \
                 or remove it ('fathom disk remove'), and repeat the request",
                keys.join(", ")
            ))),
        }
    }

    /// Prevents the export of a new disk to NBD clients without authentication, unless requested.
    fn do_not_export_unasked(
        &self,
        name: &str,
        spec: &mut DiskSpec,
        out: &mut Vec<Effect>,
    ) -> Result<(), RequestError> {
        let Some(listener) =
            { self.settings.open_listener.as_ref() }.filter(|_| spec.nbd.is_none())
        else {
            return Ok(());
        };
        if spec.vhost_user.is_none() && spec.fuse.is_none() {
            return Err(ErrorKind::Invalid.because(format!(
                "disk '{name}': no client could connect: the NBD listener {listener} \
                 authenticates no client, so it exports only disks with --nbd (nbd = true); add \
                 the disk with --nbd or --vhost-user"
            )));
        }
        let text = format!(
            "not exported to NBD clients, because listener {listener} authenticates no client; \
             add the disk with --nbd (nbd = true) to export it"
        );
        log(Level::Warning, name, &text, out);
        spec.nbd = Some(false);
        Ok(())
    }

    /// Begins to serve or change a disk according to its definition.
    pub(super) fn begin_definition(
        &mut self,
        name: &str,
        spec: DiskSpec,
        owner: Definition,
        out: &mut Vec<Effect>,
    ) {
        let request = HostRequest::Put {
            spec: Box::new(spec),
            named: None,
            only_if: Condition::default(),
        };
        let putting = Putting {
            by: Requester::Server,
            owner,
            is_written: false,
        };
        self.ask(name, request, Work::Putting(putting), out);
    }

    /// Records the owner after the host has added or changed the disk, or has rejected that.
    pub(super) fn put_done(
        &mut self,
        name: &str,
        putting: Putting,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let Putting {
            by,
            owner,
            is_written,
        } = putting;
        let created = match outcome {
            Err(error) if by == Requester::Server => {
                return self.open_failed(name, owner, error, out);
            }
            Err(error) => return reply(by, name, Err(error), out),
            Ok(done) => matches!(done, Done::Put { created: true }),
        };
        let entry = self.entry(name);
        // (A host that replied too late may have opened the disk before.)
        if created || !entry.is_served() {
            if matches!(entry.presence, Presence::Failed { .. }) {
                log(Level::Info, name, "opened after an error", out);
            }
            entry.presence = Presence::Served;
            entry.owner.get_or_insert(Definition::Transient);
        }
        let is_as_before = entry.owner.as_ref() == Some(&owner);
        let is_uncertain = entry.is_file_uncertain;
        match owner {
            // After a removal, the recorded contents of the file may be wrong.
            Definition::Persistent(spec) if is_written => {
                match created || !is_as_before || is_uncertain {
                    true => self.write(name, *spec, AfterWrite::Put { by, created }, out),
                    false => reply(by, name, Ok(Reply::Disk { created }), out),
                }
            }
            Definition::Transient => reply(by, name, Ok(Reply::Disk { created }), out),
            owner => {
                entry.owner = Some(owner);
                reply(by, name, Ok(Reply::Disk { created }), out);
            }
        }
    }

    /// Handles the failure to open or change a defined disk.
    fn open_failed(
        &mut self,
        name: &str,
        owner: Definition,
        error: RequestError,
        out: &mut Vec<Effect>,
    ) {
        let place = { self.places.get(name) }.filter(|_| owner == Definition::Static);
        let problem = match place {
            Some(place) => format!("{} (defined in {place})", error.text),
            None => error.text,
        };
        let entry = self.entry(name);
        if entry.is_served() {
            return log(Level::Error, name, &problem, out);
        }
        let (before, is_known) = match &entry.presence {
            Presence::Failed {
                problem: last,
                attempts,
                ..
            } => (*attempts, *last == problem),
            Presence::Absent | Presence::Served => (0, false),
        };
        let is_final = error.kind == ErrorKind::Invalid;
        entry.owner = Some(owner);
        entry.presence = Presence::Failed {
            problem: problem.clone(),
            attempts: before.saturating_add(1),
            is_final,
        };
        if !is_known {
            log(Level::Error, name, &problem, out);
        }
        if !is_final {
            out.push(Effect::RetryAfter {
                disk: name.to_owned(),
                pause: FIRST_PAUSE
                    .saturating_mul(1 << before.min(8))
                    .min(LONGEST_PAUSE),
            });
        }
    }

    /// Retries to open a disk.
    pub(super) fn retry(&mut self, name: &str, out: &mut Vec<Effect>) {
        let Some(entry) = self.entries.get(name) else {
            return;
        };
        let is_due = matches!(
            entry.presence,
            Presence::Failed {
                is_final: false,
                ..
            }
        );
        let owner = entry.owner.clone();
        let spec = entry.stored().or(entry.declared.as_deref()).cloned();
        match (is_due, &entry.work, owner, spec) {
            (true, None, Some(owner), Some(spec)) => self.begin_definition(name, spec, owner, out),
            // A client's request for the disk is in progress, and may fail.
            (true, Some(_), ..) => out.push(Effect::RetryAfter {
                disk: name.to_owned(),
                pause: FIRST_PAUSE,
            }),
            _ => {}
        }
    }

    /// Continues after the host has removed a new disk whose file could not be written.
    ///
    /// The failed write may have changed the file, which is removed or restored.
    pub(super) fn withdrawn(
        &mut self,
        name: &str,
        by: Requester,
        problem: String,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        entry.presence = Presence::Absent;
        match entry.stored().cloned() {
            // The disk had been removed until the server restarts.
            Some(before) => {
                let then = AfterWrite::Withdrawn { by, problem };
                self.write(name, before, then, out);
            }
            None => {
                entry.work = Some(Work::ErasingWithdrawn { by, problem });
                let disk = name.to_owned();
                out.push(Effect::Erase { disk });
            }
        }
    }

    /// Replies after the file of a disk that could not be added was restored, or could not be.
    pub(super) fn withdrawal_stored(
        &mut self,
        name: &str,
        by: Requester,
        problem: String,
        outcome: Result<(), String>,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        if !matches!(entry.owner, Some(Definition::Persistent(_))) {
            entry.owner = None;
        }
        if let Err(second) = outcome {
            log(Level::Error, name, &second, out);
        }
        reply(by, name, Err(ErrorKind::Failed.because(problem)), out);
    }
}
