//! Landlock: limits files, TCP ports, signals and sockets, for all system calls that use them.

use crate::report::Report;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// The newest Landlock ABI that is tested. Older kernels enforce the parts that they support.
const WANTED: ABI = ABI::V7;

/// A file, or a directory with everything below it.
pub struct Allowed {
    /// The file or directory, opened in any way (O_PATH suffices).
    pub at: OwnedFd,
    /// Operations that are allowed there.
    pub access: PathAccess,
}

/// Operations that are allowed on a file, or below a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathAccess {
    /// Read files and list directories.
    Read,
    /// Also write to and truncate existing files.
    Write,
    /// Also create and remove files and sockets.
    Make,
}

impl PathAccess {
    fn rights(self, is_directory: bool) -> BitFlags<AccessFs> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let write = read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
        let rights = match self {
            PathAccess::Read => read,
            PathAccess::Write => write,
            PathAccess::Make => {
                write | AccessFs::MakeReg | AccessFs::MakeSock | AccessFs::RemoveFile
            }
        };
        match is_directory {
            true => rights,
            false => rights & AccessFs::from_file(WANTED),
        }
    }
}

/// Creates a ruleset that allows nothing but what later rules add. With `connects`, connections to
/// TCP ports are allowed.
fn nothing(connects: bool) -> Result<RulesetCreated, RulesetError> {
    let ports = match connects {
        true => AccessNet::BindTcp.into(),
        false => AccessNet::from_all(WANTED),
    };
    Ruleset::default()
        .handle_access(AccessFs::from_all(WANTED))?
        .handle_access(ports)?
        .scope(Scope::from_all(WANTED))?
        .create()
}

/// Creates a ruleset for threads that open nothing by name. `None` if the kernel has no Landlock.
pub(crate) fn nowhere() -> Result<Option<OwnedFd>, RulesetError> {
    Ok(nothing(false)?.into())
}

/// Restricts this thread, and the threads that it starts, to these paths. With `connects`,
/// connections to TCP ports are allowed.
pub(crate) fn restrict_to(
    allowed: Vec<Allowed>,
    connects: bool,
    report: &mut Report,
) -> Result<(), RulesetError> {
    let mut ruleset = nothing(connects)?;
    let count = allowed.len();
    for Allowed { at, access } in allowed {
        let rights = access.rights(is_directory(&at));
        ruleset = ruleset.add_rule(PathBeneath::new(at, rights))?;
    }
    let status = ruleset.restrict_self()?;
    match (status.ruleset, version()) {
        (RulesetStatus::NotEnforced, Ok(_)) => report.missing("paths", "Landlock does not do it"),
        (RulesetStatus::NotEnforced, Err(why)) => report.missing("paths", why),
        _ => report.in_force(
            "paths",
            format!("{count} files and directories are within reach"),
        ),
    }
    add_parts(report);
    Ok(())
}

fn is_directory(file: &impl AsFd) -> bool {
    let Ok(file) = file.as_fd().try_clone_to_owned() else {
        return false;
    };
    let metadata: io::Result<_> = std::fs::File::from(file).metadata();
    metadata.is_ok_and(|metadata| metadata.is_dir())
}

/// Reports what this kernel's Landlock restricts besides paths.
fn add_parts(report: &mut Report) {
    let abi = version().unwrap_or(0);
    for (part, since, what) in [
        ("ports", 4, "no TCP port is bound or connected to"),
        ("device ioctls", 5, "devices that are opened get none"),
        ("signals", 6, "none go to other processes"),
        (
            "abstract sockets",
            6,
            "none of other processes are connected to",
        ),
    ] {
        match abi >= since {
            true => report.in_force(part, what),
            false => {
                let why = format!("Landlock's version {since} is needed; here it is {abi}");
                report.missing(part, why);
            }
        }
    }
}

/// Returns the ABI version of the kernel's Landlock, or why Landlock is unavailable.
pub(crate) fn version() -> Result<i64, &'static str> {
    const VERSION: u32 = 1;
    let create = libc::SYS_landlock_create_ruleset;
    let nothing = std::ptr::null::<u8>();
    // SAFETY: with this flag the call uses no memory.
    let version = unsafe { libc::syscall(create, nothing, 0usize, VERSION) };
    match version {
        1.. => Ok(version),
        _ => Err(match io::Error::last_os_error().raw_os_error() {
            Some(libc::EOPNOTSUPP) => "Landlock is switched off (see lsm= of the kernel)",
            _ => "this kernel has no Landlock (since Linux 5.13)",
        }),
    }
}
