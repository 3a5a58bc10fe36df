//! The files that a server has its disks from: read at the start, and again when it is told to.

use super::keeping::Wanted;
use super::places::places;
use super::{Book, Definitions, Origin, Removal, Settings};
use crate::answer::{Answer, Asker};
use crate::condition::Condition;
use crate::error::Error;
use crate::events::Happened;
use crate::files::{Found, Keeper, KeptDisks, Reread, reread};
use crate::options::DiskOptions;
use fathom_spec::DiskSpec;
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::Path;
use std::time::{Duration, Instant};

/// Disks that are kept have so long to be there before the server says that it is ready.
const OPEN: Duration = Duration::from_secs(10);

impl Book {
    /// Serves the persistent disks of this directory, which were `found` there, and writes new ones there.
    /// A disk that cannot be served is logged, and keeps no other from being served.
    pub fn keep_disks_in(&mut self, kept: KeptDisks, found: Found) -> Result<(), Error> {
        self.start_keeper(kept)?;
        for (_, problem) in found.problems {
            tracing::error!("{problem}");
        }
        for table in found.disks {
            // (That of a static disk was looked at before.)
            if !self.definitions.declared.contains_key(&table.name) {
                self.reload_persistent(table);
            }
        }
        Ok(())
    }

    /// Serves the static disks, of a host that has none yet. A disk that cannot be served is logged, and
    /// keeps no other from being served.
    pub fn begin(&mut self, disks: &[DiskOptions]) {
        for table in tables(disks).cloned() {
            let asker = to_log(table.name.clone());
            self.put(Wanted::defined(table, Origin::Configuration), asker);
        }
    }

    /// Until all disks are there, or long enough.
    pub fn wait_for_coming(&mut self) {
        let deadline = Instant::now() + OPEN;
        while !self.is_settled() && self.wait_for_event(deadline) {
            self.turn();
        }
    }

    /// False: none has come until `deadline`.
    fn wait_for_event(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(left) = Timespec::try_from(left).ok().filter(|_| !left.is_zero()) else {
            return false;
        };
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: Vec<_> = self.events().into_iter().map(input).collect();
        let _ = poll(&mut fds, Some(&left));
        true
    }

    pub(super) fn start_keeper(&mut self, kept: KeptDisks) -> Result<(), Error> {
        let failed = Error::io("cannot start a thread");
        self.kept = Some(kept.lock().map_err(&failed)?);
        self.keeper = Some(Keeper::start(kept).map_err(failed)?);
        Ok(())
    }

    /// Read the configuration again; what has changed is changed when that is done.
    pub fn reload(&mut self) {
        let Some(config) = self.config.clone() else {
            return;
        };
        let post = self.mail.post();
        let done = move |read| post.send(Box::new(|book: &mut Book| book.take_in_reread(read)));
        if let Err(error) = reread(config, self.keeper.as_ref(), done) {
            tracing::error!(
                "configuration: not read again: cannot start a thread: {}",
                cause(error)
            );
            self.reloaded = true;
        }
    }

    /// Whether a reload has ended since this was asked last, well or badly.
    pub fn take_reloaded(&mut self) -> bool {
        std::mem::take(&mut self.reloaded)
    }

    /// Do what has changed in the configuration.
    pub(super) fn take_in_reread(
        &mut self,
        Reread {
            options,
            kept: found,
        }: Reread,
    ) {
        self.reloaded = true;
        let options = match options {
            Ok(options) => options,
            Err(error) => {
                return tracing::error!(
                    "{error}; the configuration was not reloaded, and no disk was changed"
                );
            }
        };
        if Settings::of(&options) != self.settings {
            tracing::warn!(
                "configuration: changes of [pool], [nbd], [tenants], api, disks-dir and sandbox \
                 take effect only after a restart"
            );
        }
        self.stop_timeout = options.stop_timeout;
        self.host.set_stop_timeout(options.stop_timeout);
        self.places = places(&options.disks);
        let listed: Vec<_> = tables(&options.disks).cloned().collect();
        let now = Definitions::of(listed.clone()).declared;
        let before = std::mem::replace(&mut self.definitions.declared, now);
        self.remove_undefined(&found);
        for table in listed {
            let is_as_before = before.get(&table.name) == Some(&table);
            self.reload_static(table, is_as_before, &found);
        }
        for (_, problem) in &found.problems {
            tracing::error!("{problem}");
        }
        for table in found.disks {
            self.reload_persistent(table);
        }
        tracing::info!("configuration: reloaded");
        self.events.tell(Happened::Reloaded);
    }

    /// Removes the disks that neither the configuration nor a file defines any more.
    fn remove_undefined(&mut self, found: &Found) {
        let declared = &self.definitions.declared;
        let is_defined = |name: &str| declared.contains_key(name) || found.has(name);
        let is_gone =
            |(name, origin): &(&String, &Origin)| **origin != Origin::Request && !is_defined(name);
        let gone = self.origins.iter().filter(is_gone);
        let gone: Vec<_> = gone.map(|(name, _)| name.clone()).collect();
        let Definitions {
            declared,
            absent,
            left_images,
        } = &mut self.definitions;
        absent.retain(|name, owner| match owner {
            Origin::Configuration => declared.contains_key(name),
            _ => found.has(name),
        });
        left_images.retain(|name, _| declared.contains_key(name));
        for name in gone {
            let (how, any) = (Removal::Undefined, Condition::default());
            self.remove(name.clone(), false, how, any, to_log(name));
        }
    }

    /// Serves or changes a disk as the configuration says, unless its entry is as before: then it stays as
    /// requests have left it.
    fn reload_static(&mut self, table: DiskSpec, is_as_before: bool, found: &Found) {
        let name = &table.name;
        let file = || self.file_of(name);
        let problem = match self.served_or_absent(name) {
            Some(Origin::Request) => Some(
                "added by the API, which owns the name until the disk is removed or the server \
                 ends; the entry in the configuration is ignored"
                    .to_owned(),
            ),
            Some(Origin::Kept(_)) if found.has(name) => Some(format!(
                "defined by {}, so the entry in the configuration is ignored; remove one of the \
                 two",
                file()
            )),
            Some(Origin::Configuration) if is_as_before => return,
            _ if self.definitions.has_left(name, &table.image.to_string()) => Some(format!(
                "the entry in the configuration names {}, an image that the disk has been \
                 switched away from, so the entry is ignored; change the entry to the disk's \
                 present image",
                table.image
            )),
            None => match second_definition(&table, found, &file()) {
                Second::OtherData(problem) => Some(problem),
                Second::SameData(warning) => {
                    tracing::warn!("disk '{name}': {warning}");
                    None
                }
                Second::None => None,
            },
            Some(_) => None,
        };
        if let Some(problem) = problem {
            return tracing::error!("disk '{name}': {problem}");
        }
        self.definitions.absent.remove(name);
        let asker = to_log(name.clone());
        self.put(Wanted::defined(table, Origin::Configuration), asker);
    }

    /// Serves or changes a disk as its file says, unless the file is as before: then it stays as requests
    /// have left it.
    fn reload_persistent(&mut self, table: DiskSpec) {
        let name = &table.name;
        let is_declared = self.definitions.declared.contains_key(name);
        match self.served_or_absent(name) {
            Some(Origin::Kept(before)) if **before == table => return,
            Some(Origin::Request) => {
                return tracing::error!(
                    "disk '{name}': added by the API, which owns the name until the disk is \
                     removed or the server ends; {} is ignored",
                    self.file_of(name)
                );
            }
            Some(Origin::Configuration) if is_declared => {
                return tracing::error!(
                    "disk '{name}': defined by the configuration, so {} is ignored; remove one \
                     of the two",
                    self.file_of(name)
                );
            }
            // (The configuration's entry was looked at already.)
            None if is_declared => return,
            _ => {}
        }
        if let Some(listener) = self.host.open_listener().filter(|_| table.nbd.is_none()) {
            tracing::warn!(
                "disk '{name}': exported at {listener}, which authenticates no client; write nbd \
                 = true or nbd = false into {} to choose",
                self.file_of(name)
            );
        }
        self.definitions.absent.remove(name);
        let asker = to_log(name.clone());
        let origin = Origin::Kept(Box::new(table.clone()));
        self.put(Wanted::defined(table, origin), asker);
    }

    /// The file that defines a persistent disk, for people.
    fn file_of(&self, name: &str) -> String {
        let dir = self.kept.as_ref().map(|(dir, _)| dir.as_path());
        file_in(dir.unwrap_or(Path::new("")), name)
    }
}

fn file_in(dir: &Path, name: &str) -> String {
    dir.join(format!("{name}.toml")).display().to_string()
}

fn tables(disks: &[DiskOptions]) -> impl Iterator<Item = &DiskSpec> {
    disks.iter().filter_map(|disk| disk.table.as_deref())
}

/// What a disk's file means for its entry in the configuration.
enum Second {
    /// There is no such file.
    None,
    /// The file names the same data, and is not used. (A warning.)
    SameData(String),
    /// Which of the two has the disk's data is not known. (An error.)
    OtherData(String),
}

fn second_definition(table: &DiskSpec, found: &Found, file: &str) -> Second {
    let name = &table.name;
    if found.problems.iter().any(|(stem, _)| stem == name) {
        return Second::OtherData(format!(
            "defined by the configuration and by {file}, which cannot be read; the disk is not \
             served, because the file may name a newer image; remove one of the two"
        ));
    }
    let Some(other) = found.disks.iter().find(|disk| disk.name == *name) else {
        return Second::None;
    };
    let keys = table.other_data(&other.clone().without_defaults());
    match keys.is_empty() {
        true => Second::SameData(format!(
            "defined by the configuration and by {file}; the file is ignored; remove one of the \
             two"
        )),
        false => Second::OtherData(format!(
            "defined by the configuration and by {file}, which differ in {}; the disk is not \
             served, because either may name the older image; remove one of the two",
            keys.join(", ")
        )),
    }
}

/// Leaves out the disks whose data a file in `dir` defines differently. Which of the two definitions is
/// the newer one is not known, and writing to the older image may destroy the newer one.
pub fn one_definition_each(disks: &[DiskOptions], found: &Found, dir: &Path) -> Vec<DiskOptions> {
    let is_known = |disk: &&DiskOptions| {
        let Some(table) = &disk.table else {
            return true;
        };
        match second_definition(table, found, &file_in(dir, &disk.name)) {
            Second::None => true,
            Second::SameData(warning) => {
                tracing::warn!("disk '{}': {warning}", disk.name);
                true
            }
            Second::OtherData(problem) => {
                tracing::error!("disk '{}': {problem}", disk.name);
                false
            }
        }
    };
    disks.iter().filter(is_known).cloned().collect()
}

/// Logs a refusal: nobody else waits for the reply.
fn to_log(name: String) -> Asker {
    Box::new(move |answer: Answer| {
        if let Err(refusal) = answer {
            tracing::error!("disk '{name}': {refusal}");
        }
    })
}
