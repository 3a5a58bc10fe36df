//! Checks caches and keepers against the image that a disk expects, before any data is fetched.

use crate::about::{About, Origin};
use crate::profile;
use crate::remote::{read_manifest, version_of};
use fathom_storage::cached::Terms;
use fathom_storage::cached::wire::{Geometry, Identity};
use fathom_units::redacted;
use std::path::Path;

/// Returns an error if the cache belongs to another image.
///
/// This check is necessary because a keeper with a complete cache never contacts the remote.
pub fn check_known(about: &About, terms: &Terms) -> Result<(), String> {
    let remedy = "if no disk uses that image any more, 'fathom base remove' removes the cache";
    if !about.is_of(&terms.remote) {
        let of = redacted(about.endpoint.as_deref().unwrap_or(&about.remote));
        return Err(format!(
            "the cache belongs to another image, {of}; {remedy}"
        ));
    }
    let origin = &about.origin;
    match is_checked(terms, (origin.size, origin.stripe, &origin.version))? {
        true => Ok(()),
        false => Err(format!(
            "the cache was not checked by this --base-manifest; {remedy}"
        )),
    }
}

/// Returns an error if a keeper does not verify its data against the manifest that the terms name.
///
/// A keeper without this verification was started for a disk that names another manifest, or none.
/// The remote may still report the same image for both.
pub fn check_greeting(
    terms: &Terms,
    geometry: &Geometry,
    identity: &Identity,
) -> Result<(), String> {
    let said = (geometry.size, geometry.stripe, identity.version.as_str());
    match is_checked(terms, said)? {
        true => Ok(()),
        false => Err(
            "the cache's keeper does not use this --base-manifest, because it was started for a \
             disk with another one, or with none; give all disks on this base image the same \
             --base-manifest"
                .into(),
        ),
    }
}

/// Returns whether size, stripe size and version match the manifest of the terms, if they name one.
fn is_checked(terms: &Terms, said: (u64, u64, &str)) -> Result<bool, String> {
    let Some(path) = &terms.cache.manifest else {
        return Ok(true);
    };
    let manifest = read_manifest(path)?;
    let version = version_of(&manifest);
    let known = (manifest.size(), manifest.stripe_size().into(), &*version);
    Ok(known == said)
}

/// Returns the boot profile: first what was recorded on this host, then what the terms name, then
/// the image's own profile.
pub fn first_profile(
    terms: &Terms,
    place: &Path,
    origin: &Origin,
    of_its_own: Vec<u32>,
) -> Vec<u32> {
    let read = |path: &Path| match profile::read(path, origin.stripe) {
        Ok(profile) => profile,
        Err(error) => {
            tracing::warn!("{}: {error}; boots are not prefetched", path.display());
            Vec::new()
        }
    };
    let own = read(&place.join(profile::FILE));
    let given = terms.cache.profile.as_deref().map(read).unwrap_or_default();
    profile::merge(own, &profile::merge(given, &of_its_own))
}
