//! What is known of an image before anything comes: what its cache is of, and what boots of it read.

use crate::about::{About, Origin};
use crate::profile;
use crate::remote::{read_manifest, version_of};
use fathom_storage::cached::Terms;
use std::path::Path;

/// Refuses a cache of something else. (It may be complete, and nobody ever asked for the rest.)
pub fn check_known(about: &About, terms: &Terms) -> Result<(), String> {
    let remedy =
        "if no disk is above that one any more, `fathom base remove` makes room for this one";
    if !about.is_of(&terms.remote) {
        let of = about.endpoint.as_deref().unwrap_or(&about.remote);
        return Err(format!("its cache is of another image, of {of}: {remedy}"));
    }
    let Some(path) = &terms.cache.manifest else {
        return Ok(());
    };
    let manifest = read_manifest(path)?;
    let known = (
        manifest.size(),
        u64::from(manifest.stripe_size()),
        version_of(&manifest),
    );
    let origin = &about.origin;
    match known == (origin.size, origin.stripe, origin.version.clone()) {
        true => Ok(()),
        false => Err(format!(
            "what is cached of it was not checked by this --base-manifest: {remedy}"
        )),
    }
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
            tracing::warn!("{}: {error}: boots are not foreseen", path.display());
            Vec::new()
        }
    };
    let own = read(&place.join(profile::FILE));
    let given = terms.cache.profile.as_deref().map(read).unwrap_or_default();
    profile::merge(own, &profile::merge(given, &of_its_own))
}
