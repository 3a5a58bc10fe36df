//! Disks that come, and that change while they are served.

use super::{Objects, to_json};
use crate::answer::{Answer, Asker, Kind, Refusal};
use crate::events::Happened;
use crate::objects::changes::{self, Changing, Event, What};
use crate::objects::disk::{Origin, Served};
use crate::options::DiskOptions;
use crate::signals::LeftToThisThread;
use crate::socket;
use crate::socket_spec::SocketSpec;
use crate::table::{DiskTable, check_name};
use fathom_exports::Listener;
use std::collections::BTreeMap;

impl Objects {
    /// Let there be this disk. `keep`: its file is to be written.
    pub(super) fn put(&mut self, table: DiskTable, origin: Origin, keep: bool, asker: Asker) {
        let table = table.without_defaults();
        let present = self.disks.iter().position(|disk| disk.name() == table.name);
        if let Some(index) = present {
            return match self.change(index, &table) {
                Err(refusal) => asker(Err(refusal)),
                Ok(()) => self.settle_origin(index, origin, keep, asker),
            };
        }
        let name = table.name.clone();
        match self.begin_to_add(table) {
            Err(refusal) => asker(Err(refusal)),
            Ok(()) => self.changing.push(Changing {
                name,
                what: What::Added { origin, keep },
                waiting: Some(asker),
            }),
        }
    }

    fn begin_to_add(&self, table: DiskTable) -> Result<(), Refusal> {
        let invalid = |text| Kind::Invalid.because(text);
        check_name(&table.name).map_err(invalid)?;
        if let Some(refusal) = self.is_changing(&table.name) {
            return Err(refusal);
        }
        table.check_paths().map_err(invalid)?;
        let options = DiskOptions::of(table, self.nbd.is_some()).map_err(invalid)?;
        if let Some(pool) = &options.disk.pool {
            self.common.pools.check(pool).map_err(invalid)?;
        }
        let listener = listen(&options)?;
        let (common, post) = (self.common.clone(), self.mail.post());
        let begun = changes::open(options, listener, common, post);
        begun.map_err(|error| Kind::Failed.because(format!("cannot start a thread: {error}")))
    }

    /// The disk is open, or could not be.
    pub(super) fn take_in_opened(&mut self, name: &str, opened: Result<Box<Served>, crate::Error>) {
        let Some(change) = self.changing.iter().position(|one| one.name == name) else {
            return;
        };
        let Changing { what, waiting, .. } = self.changing.swap_remove(change);
        let (What::Added { origin, keep }, Some(asker)) = (what, waiting) else {
            return;
        };
        let opened = opened.map_err(|error| Kind::Failed.because(error.to_string()));
        let index = match opened.and_then(|disk| self.let_in(*disk)) {
            Ok(index) => index,
            Err(refusal) => return asker(Err(refusal)),
        };
        match (keep, &self.keeper) {
            (false, _) | (_, None) => {
                self.disks[index].origin = origin;
                asker(self.show(index));
            }
            (true, Some(_)) => self.keep(index, origin, true, asker),
        }
    }

    /// Its index.
    fn let_in(&mut self, mut disk: Served) -> Result<usize, Refusal> {
        let _signals = LeftToThisThread::new();
        let added = self.nbd.as_ref().map_or(Ok(()), |nbd| nbd.add(&disk));
        if let Err(text) = added {
            changes::give_up(disk);
            return Err(Kind::Conflict.because(text));
        }
        if let Err(error) = disk.serve() {
            self.nbd.iter().for_each(|nbd| drop(nbd.remove(&disk)));
            changes::give_up(disk);
            return Err(Kind::Failed.because(error.to_string()));
        }
        tracing::info!("{}", disk.describe());
        let name = disk.name().to_owned();
        self.common.events.tell(Happened::Added { disk: name });
        self.disks.push(disk);
        Ok(self.disks.len() - 1)
    }

    /// Make a disk that is served as it is wanted, or leave it as it is.
    fn change(&mut self, index: usize, wanted: &DiskTable) -> Result<(), Refusal> {
        let disk = &mut self.disks[index];
        let name = disk.name().to_owned();
        let Some(is) = disk.table().cloned() else {
            let text = format!("disk '{name}' is there already");
            return Err(Kind::Conflict.because(text));
        };
        let Some(changes) = is.changes_to(wanted) else {
            return Err(Kind::Conflict.because(format!(
                "disk '{name}' is there by other options ({}), which cannot be changed while it is \
                 served: remove it first",
                is.differences(wanted).join(", ")
            )));
        };
        let mut changed = false;
        for (at, options) in changes.into_iter().enumerate() {
            if is.filters[at] != wanted.filters[at] {
                let set = disk.set_filter(at, &options);
                set.map_err(|text| Kind::Invalid.because(text))?;
                changed = true;
            }
        }
        match changed {
            true => self.look(index).map_err(|text| Kind::Failed.because(text)),
            false => Ok(()),
        }
    }

    /// A disk that was there is as it is wanted: note whether it is to be so again.
    fn settle_origin(&mut self, index: usize, origin: Origin, keep: bool, asker: Asker) {
        let is_kept = self.disks[index].origin == origin;
        match (keep && !is_kept && self.keeper.is_some(), &origin) {
            (true, _) => return self.keep(index, origin, false, asker),
            // It was asked for only for now.
            (false, Origin::Request) => {}
            (false, _) => self.disks[index].origin = origin,
        }
        asker(self.show(index));
    }

    /// Change options of a filter.
    pub(super) fn set_filter(
        &mut self,
        index: usize,
        filter: &str,
        options: BTreeMap<String, String>,
        temporary: bool,
        asker: Asker,
    ) {
        let disk = &mut self.disks[index];
        let set = disk.position_of_filter(filter).and_then(|at| {
            let info = disk.set_filter(at, &options)?;
            Ok((at, info))
        });
        let (at, info) = match set {
            Ok(set) => set,
            Err(text) => return asker(Err(Kind::Invalid.because(text))),
        };
        let answer = match self.look(index) {
            Ok(()) => to_json(&info),
            Err(text) => Err(Kind::Failed.because(text)),
        };
        match &self.disks[index].origin {
            Origin::Kept(table) if !temporary => {
                let mut table = table.clone();
                table.set_filter(at, &options);
                let tell = Box::new(|kept: Answer| asker(kept.and(answer)));
                self.keep(index, Origin::Kept(table), false, tell);
            }
            _ => asker(answer),
        }
    }

    /// Write a disk's file, and tell how the disk is then.
    pub(super) fn keep(&mut self, index: usize, origin: Origin, is_new: bool, asker: Asker) {
        let (Origin::Kept(table), Some(keeper)) = (&origin, &self.keeper) else {
            return asker(self.show(index));
        };
        let (name, post) = (table.name.clone(), self.mail.post());
        let done = move |outcome| {
            post.send(Event::Kept {
                name,
                outcome,
                is_new,
                asker,
            });
        };
        keeper.keep((**table).clone(), Box::new(done));
        self.disks[index].origin = origin;
    }

    /// A disk's file is written, or cannot be: then a disk that has just come goes again.
    pub(super) fn take_in_kept(
        &mut self,
        name: &str,
        outcome: Result<(), String>,
        is_new: bool,
        asker: Asker,
    ) {
        let index = match self.find(name) {
            Ok(index) => index,
            Err(refusal) => return asker(Err(refusal)),
        };
        let Err(problem) = outcome else {
            return asker(self.show(index));
        };
        tracing::error!("{problem}");
        if is_new {
            let refusal = Kind::Failed.because(problem);
            let tell = Box::new(|_: Answer| asker(Err(refusal)));
            return self.close(index, false, tell);
        }
        let text = format!("this holds until the server starts again: {problem}");
        asker(Err(Kind::Failed.because(text)));
    }

    /// What a request to the server wants of a disk.
    pub(super) fn put_by_request(&mut self, table: DiskTable, temporary: bool, asker: Asker) {
        match temporary || self.keeper.is_none() {
            true => self.put(table, Origin::Request, false, asker),
            false => {
                let origin = Origin::Kept(Box::new(table.clone().without_defaults()));
                self.put(table, origin, true, asker);
            }
        }
    }
}

/// Where its front-ends are to connect.
fn listen(options: &DiskOptions) -> Result<Option<Listener>, Refusal> {
    match &options.vhost_user {
        None => Ok(None),
        Some(spec @ SocketSpec::Path(_)) => {
            let listener = socket::listen_for_front_ends(spec, options.access);
            let listener = listener.map(Some);
            listener.map_err(|error| Kind::Failed.because(error.to_string()))
        }
        Some(_) => {
            let text = "vhost-user: sockets are inherited at the start only; give a path";
            Err(Kind::Invalid.because(text))
        }
    }
}
