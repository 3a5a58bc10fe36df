//! `fathom img amend`
//!
//! Changes options of qcow2 images and keys of encrypted images.

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

/// Names of the options that can be changed.
pub const AMENDABLE: &[&str] = &["compat", "lazy_refcounts", "refcount_bits"];

/// Changes the given options of a qcow2 image, either all or none. The contents of its disk stay
/// the same. A kill at any time leaves either the old or the new image.
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

/// Changes to the keys of an encrypted image.
#[derive(Debug)]
pub struct KeyChanges {
    /// Existing keys, one of which unlocks the image. Needed only to add keys.
    pub keys: Keys,
    /// Keys to add.
    pub add: Vec<Passphrase>,
    /// Time that unlocking with a new key should take. A guess of the key takes as long.
    pub iter_time: Duration,
    /// Key slots to remove.
    pub remove: Vec<Slot>,
}

/// Changes the keys of an encrypted image: adds keys first, then removes keys. The image's data
/// stays the same. `say` receives each change. A kill at any time leaves keys that unlock the
/// image.
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
