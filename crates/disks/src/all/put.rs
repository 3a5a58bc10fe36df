//! Adds disks, and changes disks that are served.

use super::Objects;
use crate::changes;
use crate::disk::Served;
use fathom_control::{Condition, ErrorKind, RequestError};
use fathom_files::gate::{self, Wanted};
use fathom_host::options::DiskOptions;
use fathom_host::signals::LeftToThisThread;
use fathom_host::{Error, socket};
use fathom_metrics::Happened;
use fathom_requests::{Answer, Filter, Reply, Responder};
use fathom_sockets::Listener;
use fathom_spec::Changes;
use fathom_spec::SocketSpec;
use fathom_spec::{DiskSpec, check_name};
use fathom_units::cause;
use std::collections::{BTreeMap, BTreeSet};

impl Objects {
    /// Adds a disk, or changes the present disk of the same name. `named`: the keys that may
    /// change.
    pub(super) fn put(
        &mut self,
        table: DiskSpec,
        named: Option<&BTreeSet<String>>,
        only_if: &Condition,
        responder: Responder,
    ) {
        let mut table = table.without_defaults();
        let present = self.disks.iter().position(|disk| disk.name() == table.name);
        if let Err(error) = self.check_condition(&table.name, present, only_if) {
            return responder(Err(error));
        }
        if let Some(index) = present {
            let is = self.disks[index].spec();
            // (The `nbd` option cannot change, and its default depends on whether the API has added
            // the disk.)
            table.nbd = table.nbd.or(is.nbd);
            let wanted = match named {
                Some(named) => table.over(named, is),
                None => Ok(table),
            };
            return match wanted {
                Ok(wanted) => self.change(index, wanted, responder),
                Err(problem) => responder(Err(ErrorKind::Invalid.because(problem))),
            };
        }
        let name = table.name.clone();
        match self.begin_to_add(table) {
            Err(error) => responder(Err(error)),
            Ok(()) => self.activities.begin_to_open(&name, responder),
        }
    }

    /// Checks a request's condition. In the same step the caller changes the disk, or marks the
    /// disk as busy.
    pub(super) fn check_condition(
        &self,
        name: &str,
        present: Option<usize>,
        only_if: &Condition,
    ) -> Result<(), RequestError> {
        let version = present.map(|index| self.version(index)).transpose()?;
        only_if.check(name, version.as_deref())?;
        // If the change in progress succeeds, the disk has another version.
        match only_if.names_versions() && self.activities.is_changing(name) {
            true => Err(Condition::overtaken(name)),
            false => Ok(()),
        }
    }

    /// Returns the reply to a request to add or change a disk.
    pub(super) fn shown(&self, index: usize, created: bool) -> Reply {
        let mut shown = self.show(index);
        shown.created = created;
        shown.into()
    }

    fn begin_to_add(&self, table: DiskSpec) -> Result<(), RequestError> {
        let invalid = |text| ErrorKind::Invalid.because(text);
        check_name(&table.name).map_err(invalid)?;
        if let Some(error) = self.activities.coming_or_going(&table.name) {
            return Err(error);
        }
        table.check_paths().map_err(invalid)?;
        let options = DiskOptions::of(table, self.nbd.is_some()).map_err(invalid)?;
        if let Some(pool) = &options.disk.pool {
            self.common.pools.check(pool).map_err(invalid)?;
        }
        let listener = listen(&options)?;
        let (common, post) = (self.common.clone(), self.mail.post());
        let begun = changes::open(options, listener, common, post);
        begun.map_err(|error| {
            ErrorKind::Failed.because(format!("cannot start a thread: {}", cause(error)))
        })
    }

    /// Handles the end of opening a disk, which may have failed.
    pub(super) fn on_opened(&mut self, name: &str, opened: Result<Box<Served>, Error>) {
        let Some(responder) = self.activities.opened(name) else {
            return;
        };
        let opened = opened.map_err(|error| ErrorKind::Failed.because(error.to_string()));
        let index = opened.and_then(|disk| self.let_in(*disk));
        responder(index.map(|index| self.shown(index, true)));
    }

    /// Serves a disk that has been opened. Returns its index.
    fn let_in(&mut self, mut disk: Served) -> Result<usize, RequestError> {
        let _signals = LeftToThisThread::begin();
        let added = self.nbd.as_ref().map_or(Ok(()), |nbd| nbd.add(&disk));
        if let Err(text) = added {
            changes::give_up(disk);
            return Err(ErrorKind::Conflict.because(text));
        }
        if let Err(error) = disk.serve() {
            self.nbd.iter().for_each(|nbd| drop(nbd.remove(&disk)));
            changes::give_up(disk);
            return Err(ErrorKind::Failed.because(error.to_string()));
        }
        tracing::info!("{}", disk.describe());
        changes::watch_size(&disk, self.mail.post());
        let name = disk.name().to_owned();
        self.common.events.tell(Happened::Added { disk: name });
        self.disks.push(disk);
        Ok(self.disks.len() - 1)
    }

    /// Changes the options of a disk that is served, as far as these options can change.
    fn change(&mut self, index: usize, wanted: DiskSpec, responder: Responder) {
        let disk = &self.disks[index];
        if let Some(error) = self.activities.busy(disk.name()) {
            return responder(Err(error));
        }
        let changed = match disk.spec().changes_to(&wanted) {
            Changes::Filters(changes) => self.change_filters(index, &wanted, &changes),
            Changes::Remake => return self.remake(index, wanted, responder),
            Changes::Others(keys) => {
                let (name, keys) = (disk.name(), keys.join(", "));
                Err(ErrorKind::Conflict.because(format!(
                    "disk '{name}': already served with other options ({keys}), which cannot be \
                     changed while it is served; remove the disk first"
                )))
            }
        };
        responder(changed.map(|()| self.shown(index, false)));
    }

    fn change_filters(
        &mut self,
        index: usize,
        wanted: &DiskSpec,
        changes: &[BTreeMap<String, String>],
    ) -> Result<(), RequestError> {
        let disk = &mut self.disks[index];
        let before = disk.spec().clone();
        let differs = |(at, _): &(usize, _)| before.filters.get(*at) != wanted.filters.get(*at);
        let mut changes = changes.iter().enumerate().filter(differs).peekable();
        if changes.peek().is_none() {
            return Ok(());
        }
        let set = changes.try_for_each(|(at, options)| disk.set_filter(at, options).map(drop));
        // After an error, no filter may have new options.
        if set.is_err()
            && let Changes::Filters(back) = disk.spec().changes_to(&before)
        {
            let now = disk.spec().filters.clone();
            for (at, options) in back.iter().enumerate() {
                // (A filter that is set forgets what it has counted.)
                if now.get(at) != before.filters.get(at) {
                    let _ = disk.set_filter(at, options);
                }
            }
        }
        let looked = self.look(index);
        set.map_err(|text| ErrorKind::Invalid.because(text))?;
        looked.map_err(|text| ErrorKind::Failed.because(text))
    }

    /// Changes options of a filter.
    pub(super) fn set_filter(
        &mut self,
        index: usize,
        filter: &str,
        options: &BTreeMap<String, String>,
    ) -> Answer {
        let disk = &mut self.disks[index];
        if let Some(error) = self.activities.busy(disk.name()) {
            return Err(error);
        }
        let at = disk.position_of_filter(filter);
        let info = at.and_then(|at| disk.set_filter(at, options));
        let info = info.map_err(|text| ErrorKind::Invalid.because(text))?;
        self.look(index)
            .map_err(|text| ErrorKind::Failed.because(text))?;
        Ok(Filter::new(info, None).into())
    }
}

/// Makes the listener of the disk's front-ends.
fn listen(options: &DiskOptions) -> Result<Option<Listener>, RequestError> {
    match &options.vhost_user {
        None => Ok(None),
        Some(SocketSpec::Path(_)) if let Some(gate) = gate::other() => {
            let disk = options.name.clone();
            let got = gate.get(&Wanted::FrontEnds { disk }, None);
            let got = got.map_err(|no| ErrorKind::Failed.because(no.text))?;
            let listener = Listener::taken_over(got.file);
            let failed = |error| format!("cannot listen for front-ends: {}", cause(error));
            Ok(Some(listener.map_err(|error| {
                ErrorKind::Failed.because(failed(error))
            })?))
        }
        Some(spec @ SocketSpec::Path(_)) => {
            let listener = socket::listen_for_front_ends(spec, options.access);
            let listener = listener.map(Some);
            listener.map_err(|error| ErrorKind::Failed.because(error.to_string()))
        }
        Some(_) => {
            let text =
                "vhost-user: sockets can be inherited only at the server's start; give a path";
            Err(ErrorKind::Invalid.because(text))
        }
    }
}
