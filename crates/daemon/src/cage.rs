//! This server's cage: which kind of thread is shut in how.

use fathom_core::ThreadKind;
use fathom_host::users::User;
use fathom_sandbox::{Allowed, Kind, Mode, PathAccess, Tenant};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Shut this process in, before it has threads that matter, and each thread as it starts.
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

/// Shut in a tenant, before it has threads: what it has not open by then it gets from its supervisor.
/// `user`: who it becomes.
/// `connects`: it has disks whose library makes connections, by what is in these directories, too.
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

/// Kernels before 6.4 say some things of the machine (a page's size among them) only in a file, which
/// the first who asks opens: not every thread could.
fn know_machine() {
    rustix::param::page_size();
}

/// What the kernel says of the process and of the machine.
const KERNEL: [&str; 3] = ["/proc/self", "/proc/sys/vm", "/sys/devices/system"];

/// What says where others are, and who one is to them: Ceph's own, and names of hosts.
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
        ThreadKind::Helper => Kind::Helper,
        ThreadKind::Log => Kind::Log,
        ThreadKind::Watch => Kind::Watch,
    }
}
