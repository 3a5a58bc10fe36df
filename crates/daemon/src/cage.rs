//! The sandbox of the server's and the tenants' processes, and of each kind of thread.

use fathom_core::ThreadKind;
use fathom_host::users::User;
use fathom_sandbox::{Allowed, Kind, Mode, PathAccess, Tenant};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Applies the server's sandbox to this process, before it starts important threads, and to each
/// new thread.
pub fn enter(mode: Mode) {
    know_machine();
    let report = fathom_sandbox::cage_server(mode);
    if mode != Mode::Off {
        fathom_core::at_thread_start(|kind| fathom_sandbox::enter(kind_of(kind)));
    }
    for part in report.parts.iter().filter(|part| !part.in_force) {
        tracing::warn!(
            "--sandbox {mode}: cannot apply {}: {}; the server runs without it",
            part.name,
            part.why
        );
    }
}

/// Applies a tenant's sandbox to this process, before it starts threads. From then on, the
/// supervisor opens files for it.
///
/// `user`: the user that the process becomes. `connects`: the directories with settings of
/// libraries that make network connections; None: no disk of the tenant needs these.
pub fn lock_up(mode: Mode, user: Option<User>, connects: Option<&[PathBuf]>) -> io::Result<()> {
    know_machine();
    let network = connects.map_or(&[][..], |_| &NETWORK);
    let own = KERNEL.iter().chain(network).map(Path::new);
    let settings = connects.unwrap_or_default().iter().map(PathBuf::as_path);
    let read = |path: &Path| {
        let at = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(path)
            .ok()?;
        let (at, access) = (at.into(), PathAccess::Read);
        Some(Allowed { at, access })
    };
    let tenant = Tenant {
        mode,
        user: user.map(|user| (user.uid, user.gid)),
        connects: connects.is_some(),
        allowed: own.chain(settings).filter_map(read).collect(),
        ..Tenant::default()
    };
    tenant.lock_up()?;
    if mode != Mode::Off {
        fathom_core::at_thread_start(|kind| fathom_sandbox::enter(kind_of(kind)));
    }
    Ok(())
}

/// Reads facts about the machine, such as the page size, while that is possible. On kernels before
/// 6.4, the first caller reads them from a file, and a thread in a sandbox may be unable to open
/// that file.
fn know_machine() {
    rustix::param::page_size();
}

/// Files of the kernel about the process and the machine.
const KERNEL: [&str; 3] = ["/proc/self", "/proc/sys/vm", "/sys/devices/system"];

/// Configuration files of Ceph, and of the resolver of host names.
const NETWORK: [&str; 7] = [
    "/etc/ceph",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
];

fn kind_of(kind: ThreadKind) -> Kind {
    match kind {
        ThreadKind::General => Kind::General,
        ThreadKind::Worker => Kind::Worker,
        ThreadKind::Io => Kind::Io,
        ThreadKind::Session => Kind::Session,
        ThreadKind::NbdListener => Kind::NbdListener,
        ThreadKind::NbdConnection => Kind::NbdConnection,
        ThreadKind::Fuse => Kind::Fuse,
        ThreadKind::Helper => Kind::Helper,
        ThreadKind::Log => Kind::Log,
        ThreadKind::Watch => Kind::Watch,
    }
}
