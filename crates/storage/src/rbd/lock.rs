//! The exclusive lock of an image.

use super::handle::Handle;
use super::image::Image;
use super::library::{LOCK_EXCLUSIVE, Watcher};
use fathom_core::DiskError;
use std::borrow::Cow;
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;

/// Who has an image locked.
enum Locker {
    /// A client that uses it, by its address.
    Client(String),
    /// Somebody who wants it left alone, by `rbd lock add`.
    Hand,
}

/// Longer than what is said of the one client that has the lock.
const MOST_TEXT: usize = 1024;
/// More clients than any image has.
const MOST_WATCHERS: usize = 256;
/// Of a lock that the library takes for whoever writes.
const OWN_TAG: &str = "internal";

/// Of texts that end with a zero byte each.
fn first(texts: &[u8]) -> Cow<'_, str> {
    let first = CStr::from_bytes_until_nul(texts).unwrap_or_default();
    first.to_string_lossy()
}

impl Image {
    /// From now on only this client writes it; blocking. One that is dead is shut out of the cluster first,
    /// which takes as long as the cluster needs to see that.
    pub(super) fn lock(&self) -> Result<(), DiskError> {
        // (The library would ask one that is alive to let go of it, and QEMU does.)
        self.refuse(self.owner()?, "")?;
        // SAFETY: the image is open.
        let locked =
            unsafe { (self.library().rbd_lock_acquire)(self.handle().raw(), LOCK_EXCLUSIVE) };
        match -locked {
            libc::EROFS | libc::EBUSY | libc::EAGAIN => {
                Err(self.unusable("in use: another client has locked the image".into()))
            }
            _ => self.result(locked, "cannot lock the image"),
        }
    }

    /// Fails if a client that is alive had it locked when it was opened by that handle; blocking. `advice`: what to do about
    /// it.
    pub(super) fn refuse_locked(&self, handle: &Handle, advice: &str) -> Result<(), DiskError> {
        self.refuse(self.locker(handle)?, advice)
    }

    fn refuse(&self, locker: Option<Locker>, advice: &str) -> Result<(), DiskError> {
        let problem = match locker {
            Some(Locker::Client(address)) if self.is_watched_by(&address)? => format!(
                "in use, or was until half a minute ago: client {address} has locked the image \
                 (`rbd status` shows it)"
            ),
            Some(Locker::Hand) => {
                "locked by hand (`rbd lock ls` shows the lock, `rbd lock rm` removes it)".to_owned()
            }
            Some(Locker::Client(_)) | None => return Ok(()),
        };
        Err(self.unusable(problem + advice))
    }

    /// Whether the client of that address is alive, or was until half a minute ago.
    fn is_watched_by(&self, address: &str) -> Result<bool, DiskError> {
        let library = self.library();
        let none = Watcher {
            address: null_mut(),
            id: 0,
            cookie: 0,
        };
        let mut watchers = vec![none; MOST_WATCHERS];
        let mut count = watchers.len();
        let list = library.rbd_watchers_list;
        // SAFETY: the image is open, and there is room for so many.
        let listed = unsafe { list(self.handle().raw(), watchers.as_mut_ptr(), &mut count) };
        if listed == -libc::ERANGE {
            // So many are not all dead.
            return Ok(true);
        }
        self.result(listed, "cannot read the image's watchers")?;
        let is_it = |watcher: &Watcher| {
            // SAFETY: the library has left a string in each.
            let other = unsafe { CStr::from_ptr(watcher.address) };
            other.to_bytes() == address.as_bytes()
        };
        let found = watchers.iter().take(count).any(is_it);
        // SAFETY: they are given back once.
        unsafe { (library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        Ok(found)
    }

    /// Who has it locked, or had it when that client died, as the cluster has it now; of an image that is open for writing,
    /// with such a lock.
    fn owner(&self) -> Result<Option<Locker>, DiskError> {
        let (library, mut mode) = (self.library(), 0);
        let (mut owners, mut count) = ([null_mut(); 1], 1);
        let get = library.rbd_lock_get_owners;
        // SAFETY: the image is open; places for a number, and for so many strings.
        let got = unsafe {
            get(
                self.handle().raw(),
                &mut mode,
                owners.as_mut_ptr(),
                &mut count,
            )
        };
        match -got {
            libc::ENOENT => return Ok(None),
            // By something else than the library.
            libc::EBUSY | libc::ERANGE => return Ok(Some(Locker::Hand)),
            _ => self.result(got, "cannot read the image's locks")?,
        }
        if count == 0 {
            return Ok(None);
        }
        // SAFETY: the library has left a string there.
        let address = unsafe { CStr::from_ptr(owners[0]) };
        let address = address.to_string_lossy().into_owned();
        // SAFETY: it is given back once.
        unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(Some(Locker::Client(address)))
    }

    /// Likewise, of an image that is only read: as it was when it was opened by that handle.
    fn locker(&self, handle: &Handle) -> Result<Option<Locker>, DiskError> {
        let mut exclusive = 0;
        // Of the lock, and of those who have it: their names, their cookies, and their addresses.
        let mut texts = [[0_u8; MOST_TEXT]; 4];
        let mut lens = [MOST_TEXT; 4];
        let [tag, names, cookies, addresses] =
            texts.each_mut().map(|text| text.as_mut_ptr().cast());
        let [tag_len, names_len, cookies_len, addresses_len] = lens.each_mut();
        let list = self.library().rbd_list_lockers;
        // SAFETY: the image is open; places for a number and for four texts of so many bytes.
        let listed = unsafe {
            list(
                handle.raw(),
                &mut exclusive,
                tag,
                tag_len,
                names,
                names_len,
                cookies,
                cookies_len,
                addresses,
                addresses_len,
            )
        };
        if listed == -(libc::ERANGE as isize) {
            // More than one: the library's own lock has one owner.
            return Ok(Some(Locker::Hand));
        }
        self.result(listed as c_int, "cannot read the image's locks")?;
        let [tag, _, _, address] = texts.each_ref().map(|text| first(text));
        Ok(match listed {
            0 => None,
            _ if tag == OWN_TAG => Some(Locker::Client(address.into_owned())),
            _ => Some(Locker::Hand),
        })
    }

    /// Somebody else may have it; blocking.
    pub(super) fn unlock(&self) -> Result<(), DiskError> {
        // SAFETY: the image is open.
        let result = unsafe { (self.library().rbd_lock_release)(self.handle().raw()) };
        self.result(result, "cannot unlock the image")
    }
}
