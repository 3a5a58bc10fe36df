//! The exclusive lock of an image.

use super::handle::Handle;
use super::image::Image;
use super::library::{LOCK_EXCLUSIVE, Watcher};
use fathom_core::DiskError;
use std::borrow::Cow;
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;

/// Owner of an image's lock.
enum Locker {
    /// A client that uses the image, by its address.
    Client(String),
    /// An administrator who locked the image with `rbd lock add`.
    Hand,
}

/// Size in bytes of each text buffer for one lock owner; more than any client needs.
const MOST_TEXT: usize = 1024;
/// Maximum number of watchers to list; more than any image has.
const MOST_WATCHERS: usize = 256;
/// Tag of a lock that the library acquires for a writer.
const OWN_TAG: &str = "internal";

/// Returns the first of several zero-terminated texts.
fn first(texts: &[u8]) -> Cow<'_, str> {
    let first = CStr::from_bytes_until_nul(texts).unwrap_or_default();
    first.to_string_lossy()
}

impl Image {
    /// Acquires the exclusive lock, so that only this client can write the image; blocking. A dead
    /// lock owner is blocklisted first, which takes the time that the cluster needs to detect the
    /// dead owner.
    pub(super) fn lock(&self) -> Result<(), DiskError> {
        // Live owners are refused here: the library would ask them to release the lock, and QEMU
        // does release it.
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

    /// Fails if a live client had locked the image when `handle` was opened; blocking. `advice` is
    /// appended to the error.
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

    /// Returns whether the client with that address is alive, or was until half a minute ago.
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
        // SAFETY: the image is open, and the buffer has room for `count` watchers.
        let listed = unsafe { list(self.handle().raw(), watchers.as_mut_ptr(), &mut count) };
        if listed == -libc::ERANGE {
            // With more than `MOST_WATCHERS` watchers, at least one client is probably alive.
            return Ok(true);
        }
        self.result(listed, "cannot read the image's watchers")?;
        let is_it = |watcher: &Watcher| {
            // SAFETY: the library has stored a string in each watcher.
            let other = unsafe { CStr::from_ptr(watcher.address) };
            other.to_bytes() == address.as_bytes()
        };
        let found = watchers.iter().take(count).any(is_it);
        // SAFETY: the watchers are freed once.
        unsafe { (library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        Ok(found)
    }

    /// Returns the present lock owner in the cluster, alive or dead. The image must be open for
    /// writing and have the exclusive-lock feature.
    fn owner(&self) -> Result<Option<Locker>, DiskError> {
        let (library, mut mode) = (self.library(), 0);
        let (mut owners, mut count) = ([null_mut(); 1], 1);
        let get = library.rbd_lock_get_owners;
        // SAFETY: the image is open; the arguments are places for a number and for `count` strings.
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
            // The lock was not taken by the library.
            libc::EBUSY | libc::ERANGE => return Ok(Some(Locker::Hand)),
            _ => self.result(got, "cannot read the image's locks")?,
        }
        if count == 0 {
            return Ok(None);
        }
        // SAFETY: the library has stored a string there.
        let address = unsafe { CStr::from_ptr(owners[0]) };
        let address = address.to_string_lossy().into_owned();
        // SAFETY: the strings are freed once.
        unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(Some(Locker::Client(address)))
    }

    /// Returns the lock owner of a read-only image, as of the time when `handle` was opened.
    fn locker(&self, handle: &Handle) -> Result<Option<Locker>, DiskError> {
        let mut exclusive = 0;
        // The lock's tag, and its owners' names, cookies and addresses.
        let mut texts = [[0_u8; MOST_TEXT]; 4];
        let mut lens = [MOST_TEXT; 4];
        let [tag, names, cookies, addresses] =
            texts.each_mut().map(|text| text.as_mut_ptr().cast());
        let [tag_len, names_len, cookies_len, addresses_len] = lens.each_mut();
        let list = self.library().rbd_list_lockers;
        // SAFETY: the image is open; the arguments are places for a number and for four texts of
        // the given lengths.
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
            // The texts of several owners: not the library's own lock, which has one owner.
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

    /// Releases the exclusive lock, so that other clients can acquire it; blocking.
    pub(super) fn unlock(&self) -> Result<(), DiskError> {
        // SAFETY: the image is open.
        let result = unsafe { (self.library().rbd_lock_release)(self.handle().raw()) };
        self.result(result, "cannot unlock the image")
    }
}
