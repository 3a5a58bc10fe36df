//! What is known of an image before anything comes: what its cache is of, and what boots of it read.

use crate::about::{About, Origin};
use crate::profile;
use crate::remote::{read_manifest, version_of};
use fathom_storage::cached::Terms;
use fathom_storage::cached::wire::{Geometry, Identity};
use fathom_units::redacted;
use std::path::Path;

/// Refuses a cache of something else. (It may be complete, and nobody ever asked for the rest.)
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

/// Refuses a keeper that does not check what it fetches by the manifest that the terms name: it was started for a
/// disk that names another one, or none. Its image may be the same one as far as its place says.
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

/// Whether an image of this size, stripe and version is the one of the manifest that the terms name, if they do.
fn is_checked(terms: &Terms, said: (u64, u64, &str)) -> Result<bool, String> {
    let Some(path) = &terms.cache.manifest else {
        return Ok(true);
    };
    let manifest = read_manifest(path)?;
    let version = version_of(&manifest);
    let known = (manifest.size(), manifest.stripe_size().into(), &*version);
    Ok(known == said)
}

/// What boots read first: as was recorded here; as is said; as the image says.
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
