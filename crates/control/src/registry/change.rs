//! Changes that a disk's definition follows: options of filters, the size, and the owner.

use super::{Registry, reply};
use crate::entry::{AfterWrite, Requester, Work};
use crate::error::{ErrorKind, RequestError};
use crate::event::{Done, Effect, HostRequest};
use crate::request::Reply;
use fathom_spec::DiskSpec;
use fathom_stack::position_of_filter;
use std::collections::BTreeMap;

/// The name of a filter, and the new values of its options.
type FilterChange = (String, BTreeMap<String, String>);

impl Registry {
    pub(super) fn begin_to_set_filter(
        &mut self,
        name: &str,
        by: Requester,
        filter: String,
        options: BTreeMap<String, String>,
        until_restart: bool,
        out: &mut Vec<Effect>,
    ) {
        if let Err(error) = self.check_served(name) {
            return reply(by, name, Err(error), out);
        }
        let request = HostRequest::SetFilter {
            filter: filter.clone(),
            options: options.clone(),
        };
        let work = Work::SettingFilter {
            by,
            filter,
            options,
            until_restart,
        };
        self.ask(name, request, work, out);
    }

    /// Stores `change`, after the host has set the filter's options.
    pub(super) fn filter_set(
        &mut self,
        name: &str,
        by: Requester,
        change: Option<FilterChange>,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let info = match outcome {
            Ok(Done::FilterSet(info)) => info,
            Ok(_) => return reply(by, name, Err(unexpected(name)), out),
            Err(error) => return reply(by, name, Err(error), out),
        };
        let entry = self.entry(name);
        let is_static = entry.is_static();
        let stored = entry.stored().zip(change);
        let changed = stored.map(|(stored, (filter, options))| {
            let mut spec = stored.clone();
            let names: Vec<_> = spec.filters.iter().map(|one| &*one.name).collect();
            if let Ok(at) = position_of_filter(&names, &filter) {
                spec.set_filter(at, &options);
            }
            spec
        });
        self.store_change(name, by, changed, Reply::Filter { info, is_static }, out);
    }

    pub(super) fn begin_resize(
        &mut self,
        name: &str,
        by: Requester,
        size: Option<u64>,
        shrink: bool,
        out: &mut Vec<Effect>,
    ) {
        match self.check_served(name) {
            Err(error) => reply(by, name, Err(error), out),
            Ok(()) => {
                let request = HostRequest::Resize { size, shrink };
                self.ask(name, request, Work::Resizing { by }, out);
            }
        }
    }

    pub(super) fn resized(
        &mut self,
        name: &str,
        by: Requester,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let bytes = match outcome {
            Ok(Done::Resized(bytes)) => bytes,
            Ok(_) => return reply(by, name, Err(unexpected(name)), out),
            Err(error) => return reply(by, name, Err(error), out),
        };
        let entry = self.entry(name);
        // Most kinds of storage record their size themselves, so it need not be stored.
        let declared = entry.declared.as_deref();
        let is_defined = declared.is_some_and(|spec| spec.image.with_size(bytes).is_some());
        let is_static = entry.is_static() && is_defined;
        let changed = entry.stored().and_then(|stored| {
            let image = stored.image.with_size(bytes)?;
            Some(DiskSpec {
                image,
                ..stored.clone()
            })
        });
        self.store_change(name, by, changed, Reply::Size { bytes, is_static }, out);
    }

    /// Stores the changed definition of a persistent disk, if it differs, and then replies.
    fn store_change(
        &mut self,
        name: &str,
        by: Requester,
        changed: Option<DiskSpec>,
        answer: Reply,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        let is_uncertain = entry.is_file_uncertain;
        let stored = entry.stored();
        match changed.filter(|spec| stored != Some(spec) || is_uncertain) {
            Some(spec) => self.write(name, spec, AfterWrite::Reply { by, reply: answer }, out),
            None => reply(by, name, Ok(answer), out),
        }
    }

    /// Begins to store the present options of a disk as its definition.
    pub(super) fn begin_to_adopt(
        &mut self,
        name: &str,
        by: Requester,
        defined_at: Option<String>,
        out: &mut Vec<Effect>,
    ) {
        if let Err(error) = self.check_adoption(name, defined_at) {
            return reply(by, name, Err(error), out);
        }
        self.ask(name, HostRequest::ShowOptions, Work::Adopting { by }, out);
    }

    fn check_adoption(&self, name: &str, defined_at: Option<String>) -> Result<(), RequestError> {
        self.check_served(name)?;
        let conflict = |text| Err(ErrorKind::Conflict.because(text));
        if self.settings.disks_dir.is_none() {
            return conflict(format!(
                "disk '{name}': the server has no disks-dir, so it cannot store the disk's \
                 definition; start it with --disks-dir"
            ));
        }
        match defined_at {
            None => Ok(()),
            Some(place) => conflict(format!(
                "disk '{name}' is still defined {place}, and a name has one definition; remove it \
                 there, and repeat this command before the server reads the configuration again"
            )),
        }
    }

    pub(super) fn adopt_shown(
        &mut self,
        name: &str,
        by: Requester,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        match outcome {
            Ok(Done::Options(spec)) => {
                let then = AfterWrite::Put { by, created: false };
                self.write(name, spec.without_defaults(), then, out);
            }
            Ok(_) => reply(by, name, Err(unexpected(name)), out),
            Err(error) => reply(by, name, Err(error), out),
        }
    }
}

/// Returns the error for a reply of the wrong type.
pub(super) fn unexpected(name: &str) -> RequestError {
    ErrorKind::Failed.because(format!("disk '{name}': unexpected reply; see the log"))
}
