//! Which definition owns each disk's name.

use super::{Book, Origin};
use crate::owner::Owner;
use serde_json::Value;

impl Book {
    /// The owner of a disk's name, whether or not the disk is served; `None`: the name is free.
    pub(super) fn owner_of(&self, name: &str) -> Option<&Origin> {
        let known = self.served_or_absent(name);
        let is_declared = self.definitions.declared.contains_key(name);
        known.or(is_declared.then_some(&Origin::Configuration))
    }

    /// The owner of a disk that is served, or that was removed until the server restarts.
    pub(super) fn served_or_absent(&self, name: &str) -> Option<&Origin> {
        let served = self.origins.get(name);
        served.or_else(|| self.definitions.absent.get(name))
    }

    pub(super) fn is_static(&self, name: &str) -> bool {
        self.owner_of(name) == Some(&Origin::Configuration)
    }

    /// Adds to a reply that the change lasts until the server restarts, if the disk is static.
    pub(super) fn mark_static(&self, name: &str, reply: &mut Value) {
        if self.is_static(name)
            && let Some(reply) = reply.as_object_mut()
        {
            reply.insert("owner".into(), Owner::Static.name().into());
        }
    }

    /// Notes that a static disk has left one image for another one.
    pub(super) fn note_switch(&mut self, disk: &str, left: &Value, now: &Value) {
        let (Some(left), Some(now)) = (left.as_str(), now.as_str()) else {
            return;
        };
        let images = self.definitions.left_images.entry(disk.to_owned());
        let images = images.or_default();
        images.insert(left.to_owned());
        images.remove(now);
    }
}
