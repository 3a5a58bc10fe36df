//! The kernel's tracing file system (tracefs): finds or mounts it, and accesses the parts that
//! fathom uses.
//!
//! All tracing happens in separate instances (Documentation/trace/ftrace.rst, "Instances"), so that
//! tracing by other programs is not affected. An instance's directory is locked while its owner
//! lives. An unlocked directory therefore belongs to a killed owner and is removed.

mod instance;
mod probes;
mod sweep;

use crate::mount_table::unescaped;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::ftrace::{Format, Layout};
use crate::error::{Context, Error, Result};

pub use instance::{Instance, Stats, TraceClock};
pub use sweep::{remove_all, remove_all_on_abort};

const PLACE: &str = "/sys/kernel/tracing";
/// Source in the mount table if fathom has mounted the file system.
const SOURCE: &str = "fathom";
/// Magic number of the file system (TRACEFS_MAGIC in linux/magic.h).
const MAGIC: rustix::fs::FsWord = 0x7472_6163;
/// Attempts to open the file system, which another process may unmount at any time.
const TRIES: u32 = 10;
/// Prefix of every name that fathom creates.
const PREFIX: &str = "fathom";

/// The tracing file system of this machine.
#[derive(Clone, Debug)]
pub struct Tracefs {
    mount: Arc<Mount>,
}

#[derive(Debug)]
struct Mount {
    root: PathBuf,
    /// The open root: while it is open, the file system cannot be unmounted.
    hold: Option<fs::File>,
    /// Whether fathom has mounted the file system, in any process. The last user unmounts it.
    is_ours: bool,
}

impl Mount {
    /// Finds the file system or mounts it.
    fn open() -> Result<Mount> {
        for _ in 0..TRIES {
            let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
            let (root, is_ours) = match find(&mounts) {
                Some(found) => found,
                None => (mount_it()?, true),
            };
            let hold = fs::File::open(&root).map_err(|error| refused(&error))?;
            let kind = rustix::fs::fstatfs(&hold).map_err(|error| refused(&error.into()))?;
            // The file system's last user may just have unmounted it.
            if kind.f_type == MAGIC {
                let hold = Some(hold);
                return Ok(Mount {
                    root,
                    hold,
                    is_ours,
                });
            }
        }
        Err(Error::Unusable {
            path: PLACE.into(),
            reason: "another file system is mounted over it".into(),
        })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        drop(self.hold.take());
        if self.is_ours {
            // Fails if another process still uses the file system, which then stays mounted.
            let _ = unmount(&self.root, UnmountFlags::empty());
        }
    }
}

impl Tracefs {
    /// Finds the file system, or mounts it. A mount by the lab stays until no process has such a
    /// value or an instance of it. Also removes the instances and probes of killed runs.
    ///
    /// # Errors
    /// One line that names the obstacle: no root rights, no such file system, or a locked-down
    /// kernel.
    pub fn open() -> Result<Tracefs> {
        let mount = Arc::new(Mount::open()?);
        let tracefs = Tracefs { mount };
        tracefs.check_access()?;
        sweep::sweep(tracefs.root());
        Ok(tracefs)
    }

    /// Returns the mount point.
    pub fn root(&self) -> &Path {
        &self.mount.root
    }

    /// Returns whether the kernel has this event (`kvm/kvm_exit`).
    pub fn has_event(&self, event: &str) -> bool {
        self.root().join("events").join(event).is_dir()
    }

    /// Returns whether this tracer is available (`function`).
    pub fn has_tracer(&self, name: &str) -> bool {
        let tracers = fs::read_to_string(self.root().join("available_tracers"));
        tracers.is_ok_and(|names| names.split_whitespace().any(|one| one == name))
    }

    /// Returns whether kernel probes can be set.
    pub fn has_kprobes(&self) -> bool {
        self.root().join(probes::EVENTS).exists()
    }

    /// Creates an instance. `name` only makes its directory recognisable.
    ///
    /// # Errors
    /// When the kernel cannot create an instance.
    pub fn instance(&self, name: &str) -> Result<Instance> {
        Instance::create(self.clone(), name)
    }

    /// Returns the record format of an event.
    ///
    /// # Errors
    /// When the event does not exist, or its format file cannot be parsed.
    pub fn format(&self, event: &str) -> Result<Format> {
        let path = self.root().join("events").join(event).join("format");
        let text = get(&path).context(|| no_event(event))?;
        Format::parse(&text).map_err(|reason| Error::Unusable { path, reason })
    }

    /// Returns the page layout of the ring buffer.
    ///
    /// # Errors
    /// When the kernel's description cannot be parsed.
    pub fn layout(&self) -> Result<Layout> {
        let path = self.root().join("events/header_page");
        let text = get(&path).context(|| format!("cannot read {}", path.display()))?;
        Layout::parse(&text).map_err(|reason| Error::Unusable { path, reason })
    }

    fn check_access(&self) -> Result<()> {
        let writable = fs::OpenOptions::new()
            .write(true)
            .open(self.root().join("tracing_on"));
        match writable {
            Ok(_) => Ok(()),
            Err(error) => Err(refused(&error)),
        }
    }
}

fn no_event(event: &str) -> String {
    match event.split_once('/') {
        Some(("kvm", _)) => format!("no event {event}: load KVM (modprobe kvm_intel or kvm_amd)"),
        _ => format!("this kernel has no event {event}"),
    }
}

/// Returns the reason why tracing is unavailable, with a hint how to enable it.
fn refused(error: &io::Error) -> Error {
    let lockdown = fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    let hint = if !rustix::process::geteuid().is_root() {
        "tracing the kernel needs root: run it with sudo"
    } else if lockdown.contains("[confidentiality]") {
        "the kernel is locked down (confidentiality): boot it with lockdown=integrity or none"
    } else if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(19) {
        "this kernel has no tracing: it needs CONFIG_FTRACE and CONFIG_EVENT_TRACING"
    } else {
        "root is not allowed to trace here: a container needs CAP_SYS_ADMIN and a writable \
         /sys/kernel/tracing"
    };
    Error::Unusable {
        path: PLACE.into(),
        reason: format!("{error}: {hint}"),
    }
}

/// Finds a tracefs in a mount table (proc_pid_mounts(5)). Returns its mount point and whether
/// fathom has mounted it.
fn find(mounts: &str) -> Option<(PathBuf, bool)> {
    mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .filter(|fields| fields.get(2) == Some(&"tracefs"))
        .map(|fields| {
            let place = PathBuf::from(unescaped(fields[1]));
            (place, fields[0] == SOURCE)
        })
        // A second mount may be the automount below debugfs; the usual mount point is preferred.
        .min_by_key(|(path, _)| path.as_path() != Path::new(PLACE))
}

fn mount_it() -> Result<PathBuf> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    match mount(SOURCE, PLACE, "tracefs", flags, None::<&std::ffi::CStr>) {
        // EBUSY: another process has just mounted it.
        Ok(()) | Err(Errno::BUSY) => Ok(PLACE.into()),
        Err(error) => Err(refused(&error.into())),
    }
}

/// Reads a small file with a large buffer, because some tracefs files return all their content in
/// the first read or lose the rest.
fn get(path: &Path) -> io::Result<String> {
    use std::io::Read;
    const ROOM: usize = 64 << 10;
    let mut file = fs::File::open(path)?;
    let (mut bytes, mut length) = (vec![0; ROOM], 0);
    loop {
        if bytes.len() - length < ROOM / 2 {
            bytes.resize(bytes.len() + ROOM, 0);
        }
        match file.read(&mut bytes[length..])? {
            0 => break,
            read => length += read,
        }
    }
    bytes.truncate(length);
    // Command names may contain any bytes.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes to a control file without truncating it, because truncation clears some files.
fn put(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_place_is_preferred() {
        let mounts = "proc /proc proc rw 0 0\n\
             tracefs /sys/kernel/debug/tracing tracefs rw 0 0\n\
             none /sys/kernel/tracing tracefs rw,relatime 0 0\n";
        assert_eq!(find(mounts), Some((PLACE.into(), false)));
        let elsewhere = "t /mnt/with\\040space tracefs rw 0 0\n";
        assert_eq!(find(elsewhere), Some(("/mnt/with space".into(), false)));
        let ours = "fathom /sys/kernel/tracing tracefs rw,nosuid 0 0\n";
        assert_eq!(find(ours), Some((PLACE.into(), true)));
        assert_eq!(find("proc /proc proc rw 0 0\n"), None);
    }
}
