//! What a keeper may do: reach where its image comes from, and write to the caches. It reads what strangers send,
//! and must not become a way to this host's files.

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

/// What says where others are, whom to trust, and what machine this is.
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

/// Where users say whom to trust.
const NAMED: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// On the only thread, before anything comes from afar.
pub fn shut_in(terms: &Terms) -> io::Result<()> {
    let mode: Mode = terms.sandbox.parse().map_err(io::Error::other)?;
    let location: Option<Location> = terms.remote.parse().ok();
    if location
        .as_ref()
        .is_some_and(|location| location.kind().network)
    {
        // Its library, before it cannot be loaded any more. Who wants the image hears of it.
        let _ = fathom_storage::rbd::prepare();
    }
    // Likewise what names of hosts are looked up by.
    let _ = ("localhost", 0).to_socket_addrs();
    let named = NAMED.iter().filter_map(env::var_os).map(PathBuf::from);
    let location = location.as_ref();
    let path = location.and_then(Location::path);
    // An archive's stripes are beside its images.
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
