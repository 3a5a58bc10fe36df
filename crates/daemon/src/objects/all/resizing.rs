//! Disks that get other sizes.

use super::Objects;
use crate::answer::{Answer, Asker, Kind};
use crate::objects::changes;
use crate::objects::disk::Origin;
use crate::table::DiskTable;
use fathom_core::DiskError;
use serde_json::{Value, json};

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
        let index = self.disks.iter().position(|disk| disk.name() == name);
        if let Some(index) = index {
            self.disks[index].resized();
        }
        if let Err(error) = &resized {
            tracing::warn!("disk '{name}' cannot be resized: {error}");
        }
        let answer = resized.map(|size| json!({ "size": size }));
        let answer = answer.map_err(|error| Kind::Failed.because(error.to_string()));
        let asker = self.resizing.end(name);
        let tell: Asker = Box::new(|kept: Answer| {
            // Who has asked may have given up.
            if let Some(asker) = asker {
                asker(kept.and(answer));
            }
        });
        match index.and_then(|index| Some((index, self.file_that_says_the_size(index)?))) {
            Some((index, origin)) => self.keep(index, origin, false, tell),
            None => tell(Ok(Value::Null)),
        }
    }

    /// What is to be in the file of a disk that is kept, and is written with a size that it has no
    /// more.
    fn file_that_says_the_size(&self, index: usize) -> Option<Origin> {
        let disk = &self.disks[index];
        let (Origin::Kept(kept), Some(now)) = (&disk.origin, disk.table()) else {
            return None;
        };
        let is_as_before = kept.image == now.image;
        let image = now.image.clone();
        (!is_as_before).then(|| {
            Origin::Kept(Box::new(DiskTable {
                image,
                ..(**kept).clone()
            }))
        })
    }
}
