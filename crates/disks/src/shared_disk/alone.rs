//! Work on a disk's image, whoever uses it.

use super::{SharedDisk, Users};
use fathom_core::{DiskError, Resize};

/// Of a virtual machine that has not connected to this server.
const KNOWS_MORE: &str = "its virtual machine has not connected yet, and may know of changes that are not in the \
     image; wait until it has connected";

fn knows_more(disk: &SharedDisk, users: &Users) -> bool {
    disk.front_end_first && !users.front_end_came
}

impl SharedDisk {
    /// Why nothing may be changed in the image while nobody uses the disk: a server that was killed may have left something
    /// with the front-end that it is to have first.
    pub fn may_not_be_changed(&self) -> Option<&'static str> {
        knows_more(self, &self.users()).then_some(KNOWS_MORE)
    }

    /// This one takes the place of that one.
    pub fn succeed(&self, before: &SharedDisk) {
        let came = before.users().front_end_came;
        self.users().front_end_came |= came;
    }

    /// Gives it another size, whoever uses it. Nobody comes or goes meanwhile.
    pub fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let users = self.users();
        if users.are_some() || to.size.is_none() {
            return self.resize_active(to);
        }
        if knows_more(self, &users) {
            return Err(DiskError::Refused(format!("{}: {KNOWS_MORE}", self.name)));
        }
        self.use_for(&users, || self.resize_active(to))?
    }

    /// Has work done on what is in the image: while the disk is in use, by its users or for this alone; or while it is
    /// not, if nothing may be changed in the image. Nobody comes or goes meanwhile.
    pub fn with_image<T>(&self, work: impl FnOnce() -> T) -> Result<T, DiskError> {
        let users = self.users();
        match users.are_some() || knows_more(self, &users) {
            true => Ok(work()),
            false => self.use_for(&users, work),
        }
    }

    /// For this alone: nobody else uses it.
    fn use_for<T>(&self, users: &Users, work: impl FnOnce() -> T) -> Result<T, DiskError> {
        if users.front_end_changes {
            // (It may still be active.)
            let problem = format!("{}: its virtual machine is disconnecting; retry", self.name);
            return Err(DiskError::Refused(problem));
        }
        self.disk.activate()?;
        let done = work();
        self.disk.deactivate().map(|()| done)
    }

    fn resize_active(&self, to: &Resize) -> Result<u64, DiskError> {
        if to.size.is_some() && self.disk.info().read_only {
            let problem = format!("{}: the disk is read-only", self.name);
            return Err(DiskError::Refused(problem));
        }
        self.disk.resize(to)
    }
}
