//! Operations on a disk's image, whether the disk is in use or not.

use super::{FrontEnd, SharedDisk, Users};
use fathom_core::{DiskError, Resize};

/// Why the image must not change before its virtual machine has connected to this server.
const KNOWS_MORE: &str = "its virtual machine has not connected yet, and may know of changes that are not in the \
     image; wait until it has connected";

fn knows_more(disk: &SharedDisk, users: &Users) -> bool {
    disk.front_end_first && users.front_end == FrontEnd::NotYet
}

impl SharedDisk {
    /// Returns why the image must not be changed while the disk is not in use, or `None` if the
    /// image may be changed.
    ///
    /// The front-end may keep saved state of a killed server, which must be applied to the image
    /// before other changes.
    pub fn may_not_be_changed(&self) -> Option<&'static str> {
        knows_more(self, &self.users.lock()).then_some(KNOWS_MORE)
    }

    /// Notes that this disk replaces `before`: a front-end that has been attached to `before` has
    /// been attached here, too.
    pub fn succeed(&self, before: &SharedDisk) {
        let came = before.users.lock().front_end != FrontEnd::NotYet;
        let front_end = &mut self.users.lock().front_end;
        if came && *front_end == FrontEnd::NotYet {
            *front_end = FrontEnd::Detached;
        }
    }

    /// Resizes the disk, whether the disk is in use or not. No user attaches or detaches meanwhile.
    pub fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let users = self.users.lock();
        if users.are_some() || to.size.is_none() {
            return self.resize_active(to);
        }
        if knows_more(self, &users) {
            return Err(DiskError::Refused(format!("{}: {KNOWS_MORE}", self.name)));
        }
        self.use_for(&users, || self.resize_active(to))?
    }

    /// Calls `work`, which uses the contents of the image. No user attaches or detaches meanwhile.
    ///
    /// A disk without users is activated for the call. If the image must not be changed yet, the
    /// disk stays inactive.
    pub fn with_image<T>(&self, work: impl FnOnce() -> T) -> Result<T, DiskError> {
        let users = self.users.lock();
        match users.are_some() || knows_more(self, &users) {
            true => Ok(work()),
            false => self.use_for(&users, work),
        }
    }

    /// Activates the disk for the duration of `work`. The disk has no users.
    fn use_for<T>(&self, users: &Users, work: impl FnOnce() -> T) -> Result<T, DiskError> {
        if users.front_end == FrontEnd::Changing {
            // (The disk may still be active.)
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
