//! The sandbox of a keeper.
//!
//! A keeper may only connect to the remote and write to the caches. The keeper reads data from
//! untrusted sources, and must not give them access to the files of this host.

use crate::remote::MANIFEST;
use fathom_sandbox::{Allowed, Mode, PathAccess, Tenant};
use fathom_storage::Location;
use fathom_storage::cached::Terms;
use std::env;
use std::fs::File;
use std::io;
use std::net::ToSocketAddrs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Paths with the configuration of networks and certificates, and information on the machine.
const READ: [&str; 17] = [
    "/proc/self",
    "/proc/sys/vm",
    "/sys/devices/system",
    "/etc/ceph",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/run/systemd/resolve",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ssl",
    "/etc/pki",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/etc/ca-certificates",
    "/usr/lib/ssl",
];

/// Environment variables that name trusted certificates.
const NAMED: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Enters the sandbox. Must run on the only thread, before any remote data is read.
pub fn shut_in(terms: &Terms) -> io::Result<()> {
    let mode: Mode = terms.sandbox.parse().map_err(io::Error::other)?;
    let location: Option<Location> = terms.remote.parse().ok();
    if location
        .as_ref()
        .is_some_and(|location| location.kind().network)
    {
        // Loads the Ceph library, which cannot be loaded inside the sandbox. A failure is reported
        // to users that need the image.
        let _ = fathom_storage::rbd::prepare();
    }
    // Loads the libraries for name resolution, which cannot be loaded inside the sandbox.
    let _ = ("localhost", 0).to_socket_addrs();
    let named = NAMED.iter().filter_map(env::var_os).map(PathBuf::from);
    let location = location.as_ref();
    let path = location.and_then(Location::path);
    // The directory of an archive contains both its images and its stripes.
    let archive = path
        .filter(|_| terms.remote.ends_with(MANIFEST))
        .and_then(|path| {
            let images = path.canonicalize().ok()?;
            images.ancestors().nth(2).map(Path::to_owned)
        });
    let image = [
        path,
        archive.as_deref(),
        location.and_then(Location::settings_dir),
    ];
    let given = [&terms.cache.manifest, &terms.cache.profile];
    let read = READ.iter().map(PathBuf::from);
    let read = read
        .chain(named)
        .chain(image.into_iter().flatten().map(Path::to_owned));
    let read = read.chain(given.into_iter().flatten().cloned());
    let mut allowed: Vec<Allowed> = read
        .filter_map(|path| allow(&path, PathAccess::Read))
        .collect();
    allowed.extend(allow(&terms.cache.dir, PathAccess::Make));
    let tenant = Tenant {
        mode,
        connects: true,
        allowed,
        ..Tenant::default()
    };
    tenant.lock_up().map(drop)
}

fn allow(path: &Path, access: PathAccess) -> Option<Allowed> {
    let mut options = File::options();
    let at = options
        .read(true)
        .custom_flags(rustix::fs::OFlags::PATH.bits() as i32)
        .open(path)
        .ok()?;
    Some(Allowed {
        at: at.into(),
        access,
    })
}
