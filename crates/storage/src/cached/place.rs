//! Cached base images as a kind of storage.

use super::disk::CachedDisk;
use crate::kind::{Kind, OpenOptions, Opened, Place};
use crate::{memory, nbd, null, rbd};
use fathom_core::DiskError;
use std::fmt;
use std::sync::Arc;

const PREFIX: &str = "cached:";

pub(crate) const KIND: Kind = Kind {
    name: "cached",
    form: "cached:IMAGE",
    what: "Remote base image, fetched on demand and cached: https://..., s3://..., an NBD URI, \
         rbd:... or a path",
    prefixes: &[PREFIX],
    images: true,
    network: false,
    locks: false,
    options: &["server-reconnect", "base-cache"],
    parse: |text| {
        let text = text.to_str().ok_or("a base image's name must be UTF-8")?;
        let remote = text.strip_prefix(PREFIX).unwrap_or_default();
        match remote.is_empty() || remote.starts_with(PREFIX) {
            true => Err(format!("'{text}' does not name an image")),
            false => Ok(Arc::new(At(as_seen_from_anywhere(remote)?))),
        }
    },
};

/// Makes a path absolute, so that it names the same image for all users of the cache.
fn as_seen_from_anywhere(remote: &str) -> Result<String, String> {
    let others = [&memory::KIND, &null::KIND, &nbd::KIND, &rbd::KIND];
    let mut prefixes = others.iter().flat_map(|kind| kind.prefixes);
    if remote.contains("://") || prefixes.any(|prefix| remote.starts_with(prefix)) {
        return Ok(remote.to_owned());
    }
    let path = std::path::absolute(remote).map_err(|error| format!("{remote}: {error}"))?;
    path.into_os_string()
        .into_string()
        .map_err(|path| format!("{}: not UTF-8", path.display()))
}

/// Location from which the image is fetched.
struct At(String);

impl Place for At {
    fn remote(&self) -> Option<&str> {
        Some(&self.0)
    }

    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        let disk = CachedDisk::open(self.to_string().into(), &self.0, options)?;
        Ok(Opened {
            bytes: Some(disk.bytes()),
            identity: Some(disk.identity()),
            ..Opened::new(disk)
        })
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}
