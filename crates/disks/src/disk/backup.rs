//! Backups and dirty bitmaps of a disk.

use super::Served;
use crate::backup::{Order, Running};
use fathom_jobs::Source;
use fathom_jobs::backup::Terms;
use fathom_requests::BackupOrder;
use fathom_spec::SocketSpec;
use fathom_stack::Bitmaps;
use std::path::Path;
use std::sync::Arc;

impl Served {
    /// Returns what is needed to begin a backup with this identity. The error is for the user.
    pub fn backup_order(&self, id: String, order: BackupOrder) -> Result<Order, String> {
        let options = &self.options;
        let socket = match (order.socket, &options.vhost_user) {
            (Some(socket), _) => socket,
            (None, Some(SocketSpec::Path(path))) => {
                let mut path = path.clone().into_os_string();
                path.push(".backup");
                path.into()
            }
            (None, _) => return Err("name a socket at which NBD clients read the backup".into()),
        };
        // (The directory of a block device, such as /dev, has no room for a scratch file.)
        let file = options.disk.location.path().filter(|path| path.is_file());
        let beside = file.and_then(Path::parent);
        let scratch = order.scratch.or_else(|| beside.map(Path::to_owned));
        let scratch = scratch.ok_or("name a directory for the scratch file")?;
        Ok(Order {
            disk: options.name.clone(),
            id,
            source: self.source(),
            terms: Terms {
                scratch,
                most: order.scratch_size,
                bitmap: order.bitmap,
                held: order.held,
            },
            socket,
            access: options.access,
            shared: self.shared.clone(),
            events: self.events.clone(),
        })
    }

    /// Returns the disk below its filters, with its workers, for a job that runs while the disk is
    /// in use.
    pub fn source(&self) -> Source {
        let stack = &self.stack;
        Source {
            disk: self.shared.for_follower(stack.tap.below().clone()),
            engine: self.options.disk.engine,
            tap: stack.tap.clone(),
            workers: stack.workers.clone(),
        }
    }

    /// Returns the disk's dirty bitmaps, and the size of the disk in bytes.
    pub fn bitmaps(&self) -> (Arc<Bitmaps>, u64) {
        let tap = &self.stack.tap;
        (tap.bitmaps().clone(), tap.below().info().size)
    }

    pub fn set_backup(&mut self, backup: Running) {
        self.backup = Some(backup);
    }

    pub fn backup(&self) -> Option<&Running> {
        self.backup.as_ref()
    }

    /// Forgets the backup, which has ended, and whose final state has been reported.
    pub fn forget_backup(&mut self) {
        self.backup = None;
    }

    /// Whether other processes may write to the image while this server reads it.
    pub fn is_changed_by_others(&self) -> bool {
        self.options.disk.force_share
    }
}
