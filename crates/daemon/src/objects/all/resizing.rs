//! Disks that get other sizes.

use super::Objects;
use crate::answer::{Asker, Kind};
use crate::objects::changes;
use fathom_core::DiskError;
use serde_json::json;

impl Objects {
    pub(super) fn resize(&mut self, index: usize, size: Option<u64>, shrink: bool, asker: Asker) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        if let Some(refusal) = self.resizing.in_the_way(&name) {
            return asker(Err(refusal));
        }
        if let Err(error) = changes::resize(disk, size, shrink, self.mail.post()) {
            let text = format!("cannot start a thread: {error}");
            return asker(Err(Kind::Failed.because(text)));
        }
        self.resizing.begin(name, asker, self.stop_timeout.0);
    }

    pub(super) fn take_in_resized(&mut self, name: &str, resized: Result<u64, DiskError>) {
        let disk = self.disks.iter_mut().find(|disk| disk.name() == name);
        if let Some(disk) = disk {
            disk.resized();
        }
        if let Err(error) = &resized {
            tracing::warn!("disk '{name}' cannot be resized: {error}");
        }
        if let Some(asker) = self.resizing.end(name) {
            let answer = resized.map(|size| json!({ "size": size }));
            asker(answer.map_err(|error| Kind::Failed.because(error.to_string())));
        }
    }
}
