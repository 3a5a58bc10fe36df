//! Switches disks to other images.
//!
//! A switch has two steps. The first step opens the other image, marks the old image as superseded
//! and holds the disk's users. Then the disk's file is written. The second step resumes users on
//! the new image, or on the old image if the file could not be written. Therefore the file names
//! the image with all acknowledged writes, even if the server is killed at any time.

use super::change::unexpected;
use super::{Registry, reply};
use crate::entry::{AfterWrite, Requester, Work};
use crate::error::RequestError;
use crate::event::{Done, Effect, HostRequest};
use crate::request::{Reply, SwitchTo};
use fathom_spec::DiskSpec;

impl Registry {
    pub(super) fn begin_switch(
        &mut self,
        name: &str,
        by: Requester,
        to: SwitchTo,
        transient: bool,
        leave_bitmaps: bool,
        out: &mut Vec<Effect>,
    ) {
        let checked = self.check_served(name);
        let checked = checked.and_then(|()| self.check_image_change(name, transient));
        match checked {
            Err(error) => reply(by, name, Err(error), out),
            Ok(()) => {
                let request = HostRequest::BeginSwitch { to, leave_bitmaps };
                self.ask(name, request, Work::PreparingSwitch { by }, out);
            }
        }
    }

    /// Continues while users wait; `outcome` has the disk's options with the new image.
    pub(super) fn switch_prepared(
        &mut self,
        name: &str,
        by: Requester,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let spec = match outcome {
            Ok(Done::SwitchPrepared(spec)) => *spec,
            Ok(_) => return reply(by, name, Err(unexpected(name)), out),
            Err(error) => return reply(by, name, Err(error), out),
        };
        let entry = self.entry(name);
        if let Some(before) = entry.stored() {
            let before = Box::new(before.clone());
            let then = AfterWrite::Switch {
                by,
                before: before.clone(),
            };
            self.write(name, before.switched_to(spec), then, out);
        } else if entry.is_static() {
            let now = spec.image.to_string();
            let work = Work::ShowingImage { by, now };
            self.ask(name, HostRequest::ShowOptions, work, out);
        } else {
            self.end_switch(name, by, None, out);
        }
    }

    /// Continues while users wait; `outcome` has the image that a static disk leaves.
    pub(super) fn image_shown(
        &mut self,
        name: &str,
        by: Requester,
        now: String,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let left = match outcome {
            Ok(Done::Options(spec)) => Some(spec.image.to_string()),
            Ok(_) | Err(_) => None,
        };
        self.end_switch(name, by, left.map(|left| (left, now)), out);
    }

    fn end_switch(
        &mut self,
        name: &str,
        by: Requester,
        left: Option<(String, String)>,
        out: &mut Vec<Effect>,
    ) {
        let before = None;
        let work = Work::EndingSwitch { by, before, left };
        self.ask(name, HostRequest::EndSwitch { go: true }, work, out);
    }

    /// Ends a switch after the host has resumed users on the new image, or has rejected that.
    pub(super) fn switched(
        &mut self,
        name: &str,
        by: Requester,
        before: Option<Box<DiskSpec>>,
        left: Option<(String, String)>,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        match (outcome, before) {
            (Ok(_), _) => {
                // A reload must not bring a static disk back to the image that it has left.
                if let Some((left, now)) = left {
                    let images = &mut self.entry(name).left_images;
                    images.insert(left);
                    images.remove(&now);
                }
                reply(by, name, Ok(Reply::Disk { created: false }), out);
            }
            (Err(error), Some(before)) => self.revert_switch(name, by, *before, error, out),
            (Err(error), None) => reply(by, name, Err(error), out),
        }
    }
}
