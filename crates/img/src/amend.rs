//! `fathom img amend`

//!
//! Options of qcow2 images, and the keys of encrypted ones.

use crate::create::CreateOptions;
use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, format_of, open_locked};
use fathom_formats::Format;
use fathom_formats::offline::amend::{Changes, amend as amend_qcow2};
use fathom_formats::offline::keys::{KeySlots, Slot};
use fathom_formats::served::{Keys, Storage};
use fathom_luks::{Effort, Passphrase};
use fathom_storage::Location;
use std::time::Duration;

/// What can be another.
pub const AMENDABLE: &[&str] = &["compat", "lazy_refcounts", "refcount_bits"];

/// Changes those options of a qcow2 image that `options` were given, or none; what is on its disk stays. A kill at
/// any instant leaves the old image or the new one.
pub fn amend(
    location: &Location,
    format: Option<Format>,
    options: &CreateOptions,
) -> Result<(), Error> {
    let image = open_locked(location, &OpenOptions::writing(None))?;
    let path = image.path();
    let format = format_of(&image, format)?;
    if format != Format::Qcow2 {
        let problem =
            format!("a {format} image, and only qcow2 images have options that can be changed");
        return Err(usage(path, problem));
    }
    for name in options.given() {
        if !AMENDABLE.contains(&name) {
            let problem = match name {
                "size" => "change the size with 'fathom img resize'".to_owned(),
                "backing_file" | "backing_fmt" => {
                    "change the backing file with 'fathom img rebase'".to_owned()
                }
                name => format!(
                    "option '{name}' cannot be changed; 'fathom img convert' creates an image \
                     with another value"
                ),
            };
            return Err(usage(path, problem));
        }
    }
    let is_given = |name: &str| options.given().any(|given| given == name);
    let qcow2 = &options.qcow2;
    let changes = Changes {
        version: is_given("compat").then_some(qcow2.version),
        lazy_refcounts: is_given("lazy_refcounts").then_some(qcow2.lazy_refcounts),
        refcount_bits: is_given("refcount_bits").then_some(qcow2.refcount_bits),
    };
    amend_qcow2(image.bytes(), &changes).map_err(of(path))
}

/// Which keys are to unlock an image.
#[derive(Debug)]
pub struct KeyChanges {
    /// One of these does already. (Only for adding others.)
    pub keys: Keys,
    /// These are to, from now on.
    pub add: Vec<Passphrase>,
    /// How long a new key is to take to unlock the image: as long as a guess at it.
    pub iter_time: Duration,
    /// And these no more.
    pub remove: Vec<Slot>,
}

/// Changes who can unlock an encrypted image: first adds, then removes. Its data stays as it is. `say` is told of each
/// change. A kill at any instant leaves keys that unlock it.
pub fn change_keys(
    location: &Location,
    format: Option<Format>,
    changes: &KeyChanges,
    mut say: impl FnMut(&str, u32),
) -> Result<(), Error> {
    let image = open_locked(location, &OpenOptions::writing(None))?;
    let path = image.path();
    let format = format_of(&image, format)?;
    let slots = KeySlots::of(image.bytes(), format).map_err(of(path))?;
    let effort = Effort {
        time: changes.iter_time,
        ..Effort::default()
    };
    for new in &changes.add {
        let added = slots.add(&changes.keys, new, &effort);
        say("added", added.map_err(of(path))?);
    }
    for slot in &changes.remove {
        for number in slots.remove(slot).map_err(of(path))? {
            say("removed", number);
        }
    }
    Ok(())
}
