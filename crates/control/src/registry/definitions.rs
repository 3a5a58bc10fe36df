//! Compares the configuration and `disks-dir` with the served disks, at the start and at reloads.

use super::{Registry, log};
use crate::condition::Condition;
use crate::definition::{Definition, Found};
use crate::entry::{Entry, Presence, Requester, Waiting};
use crate::event::{Effect, Level};
use crate::request::Removal;
use crate::second_definition::SecondDefinition;
use fathom_spec::DiskSpec;

impl Registry {
    /// Adds, changes and removes disks to match their definitions.
    ///
    /// A disk whose definition is unchanged keeps the changes that requests have made.
    pub(super) fn compare(
        &mut self,
        declared: Vec<DiskSpec>,
        found: &Found,
        out: &mut Vec<Effect>,
    ) {
        let mut before = Vec::new();
        for entry in self.entries.values_mut() {
            before.extend(entry.declared.take());
            entry.conflict = None;
        }
        for spec in &declared {
            self.entry(&spec.name).declared = Some(Box::new(spec.clone()));
        }
        self.remove_undefined(found, out);
        for spec in declared {
            let is_as_before = before.iter().any(|one| **one == spec);
            self.compare_static(spec, is_as_before, found, out);
        }
        for (name, problem) in &found.problems {
            out.push(Effect::Log(Level::Error, problem.clone()));
            let entry = self.entry(name);
            if entry.owner.is_none() {
                entry.conflict.get_or_insert(problem.clone());
            }
        }
        for spec in &found.disks {
            self.compare_persistent(spec, found, out);
        }
    }

    /// Removes disks that neither the configuration nor a file defines any more.
    fn remove_undefined(&mut self, found: &Found, out: &mut Vec<Effect>) {
        let is_gone = |(name, entry): &(&String, &Entry)| {
            let is_defined = entry.declared.is_some() || found.has(name);
            let is_transient = matches!(entry.owner_to_be(), None | Some(Definition::Transient));
            !is_defined && !is_transient
        };
        let gone = self.entries.iter().filter(is_gone);
        let gone: Vec<_> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            let before = self.entry(&name).owner_to_be().cloned();
            match self.is_busy(&name) {
                true => self.wait(&name, Waiting::Undefined { before }),
                false => self.remove_one_undefined(&name, out),
            }
        }
    }

    /// Removes a disk that has no definition any more.
    pub(super) fn remove_one_undefined(&mut self, name: &str, out: &mut Vec<Effect>) {
        let entry = self.entry(name);
        if entry.is_served() {
            let (by, any) = (Requester::Server, Condition::default());
            return self.begin_removal(name, by, false, Removal::Undefined, any, out);
        }
        entry.owner = None;
        entry.presence = Presence::Absent;
        entry.left_images.clear();
    }

    /// Serves or changes a disk according to the configuration.
    fn compare_static(
        &mut self,
        spec: DiskSpec,
        is_as_before: bool,
        found: &Found,
        out: &mut Vec<Effect>,
    ) {
        let name = spec.name.clone();
        let file = self.file_of(&name);
        let disks_dir = self.settings.disks_dir.clone();
        let entry = self.entry(&name);
        let is_failed = matches!(entry.presence, Presence::Failed { .. });
        let problem = match &entry.owner {
            Some(Definition::Transient) => Some(
                "added by the API, which owns the name until the disk is removed or the server \
                 ends; the entry in the configuration is ignored"
                    .to_owned(),
            ),
            Some(Definition::Persistent(_)) if found.has(&name) => Some(format!(
                "defined by {file}, so the entry in the configuration is ignored; remove one of \
                 the two"
            )),
            Some(Definition::Static) if is_as_before && !is_failed => return,
            _ if entry.left_images.contains(&spec.image.to_string()) => Some(format!(
                "the entry in the configuration names {}, an image that the disk has been \
                 switched away from, so the entry is ignored; change the entry to the disk's \
                 present image",
                spec.image
            )),
            Some(_) if entry.is_served() => None,
            _ => match SecondDefinition::of(&spec, found, disks_dir.as_deref()) {
                SecondDefinition::OtherData(problem) => {
                    entry.owner = None;
                    entry.presence = Presence::Absent;
                    entry.conflict = Some(problem.clone());
                    Some(problem)
                }
                // The comparison of the file reports this.
                SecondDefinition::SameData(_) | SecondDefinition::None => None,
            },
        };
        match problem {
            Some(problem) => log(Level::Error, &name, &problem, out),
            None => self.follow(&name, spec, Definition::Static, out),
        }
    }

    /// Serves or changes a disk according to its file.
    fn compare_persistent(&mut self, spec: &DiskSpec, found: &Found, out: &mut Vec<Effect>) {
        let name = spec.name.clone();
        let file = self.file_of(&name);
        let disks_dir = self.settings.disks_dir.clone();
        let entry = self.entry(&name);
        let is_failed = matches!(entry.presence, Presence::Failed { .. });
        let problem = match &entry.owner {
            Some(Definition::Persistent(before)) if **before == *spec && !is_failed => {
                entry.is_file_uncertain = false;
                return;
            }
            Some(Definition::Transient) => Some(format!(
                "added by the API, which owns the name until the disk is removed or the server \
                 ends; {file} is ignored"
            )),
            Some(Definition::Static) if let Some(declared) = &entry.declared => {
                let second = SecondDefinition::of(declared, found, disks_dir.as_deref());
                if let SecondDefinition::SameData(warning) = second {
                    return log(Level::Warning, &name, &warning, out);
                }
                Some(format!(
                    "defined by the configuration, so {file} is ignored; remove one of the two"
                ))
            }
            // The entry in the configuration has already been compared.
            None if entry.declared.is_some() => return,
            _ => None,
        };
        if let Some(problem) = problem {
            return log(Level::Error, &name, &problem, out);
        }
        if let Some(listener) =
            { self.settings.open_listener.as_ref() }.filter(|_| spec.nbd.is_none())
        {
            let text = format!(
                "exported at {listener}, which authenticates no client; write nbd = true or nbd = \
                 false into {file} to choose"
            );
            log(Level::Warning, &name, &text, out);
        }
        let owner = Definition::Persistent(Box::new(spec.clone()));
        self.follow(&name, spec.clone(), owner, out);
    }

    /// Applies a definition to a disk, after the change in progress, if any.
    fn follow(&mut self, name: &str, spec: DiskSpec, owner: Definition, out: &mut Vec<Effect>) {
        if !self.is_busy(name) {
            return self.begin_definition(name, spec, owner, out);
        }
        let waiting = Waiting::Definition {
            spec: Box::new(spec),
            owner,
            before: self.entry(name).owner_to_be().cloned(),
        };
        self.wait(name, waiting);
    }

    fn is_busy(&mut self, name: &str) -> bool {
        let entry = self.entry(name);
        entry.work.is_some() || entry.removal.is_some()
    }

    /// Queues a definition that was read, which replaces those read before.
    fn wait(&mut self, name: &str, read: Waiting) {
        let is_about_requests = |waiting: &Waiting| {
            let is_read = matches!(
                waiting,
                Waiting::Definition { .. } | Waiting::Undefined { .. }
            );
            !is_read
        };
        let waiting = &mut self.entry(name).waiting;
        waiting.retain(is_about_requests);
        waiting.push_back(read);
    }

    /// Returns whether the owner of a name is the same as when definitions were read.
    ///
    /// Otherwise a request has changed the disk since, and that change takes precedence.
    pub(super) fn is_owner(
        &mut self,
        name: &str,
        before: Option<&Definition>,
        out: &mut Vec<Effect>,
    ) -> bool {
        let is_owner = self.entry(name).owner.as_ref() == before;
        if !is_owner {
            let text = "changed while the configuration was being read, so this change is kept; \
                        reload the configuration again to apply it";
            log(Level::Warning, name, text, out);
        }
        is_owner
    }
}
