//! An appliance of libguestfs: a virtual machine with a small Debian that supermin builds from this
//! machine's packages. Only guestfish can communicate with it, so a script on this machine takes
//! the agent's place.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::hosted::Hosted;
use super::{Cache, Spec};
use crate::error::{Context, Error, Result};
use crate::host::{self, Accelerator};
use crate::scratch::Scratch;

/// Program that runs scripts for libguestfs.
pub const PROGRAM: &str = "guestfish";
/// Path of the disk under test in the appliance.
pub const DISK: &str = "/dev/sda";
/// Descriptor from which the script reads uploaded data.
const UPLOAD: i32 = 5;
const SCRIPT: &str = include_str!("libguestfs.sh");
/// Folder of the built appliances.
const CACHE: &str = "/var/tmp";

/// A running appliance, which is killed on drop.
#[derive(Debug)]
pub struct Libguestfs {
    // Fields are dropped in order: processes must end before their directory is removed.
    pub hosted: Hosted,
    upload: UnixStream,
    _dir: Scratch,
}

impl Libguestfs {
    /// Starts the appliance.
    ///
    /// # Errors
    /// When libguestfs is not installed, or the appliance does not start; the error has its last
    /// messages.
    pub fn start(spec: &Spec) -> Result<Libguestfs> {
        let dir = Scratch::small()?;
        let pair = UnixStream::pair();
        let (upload, inside) = pair.context(|| "cannot make a socket".into())?;
        let memory = spec.memory.map(|bytes| (bytes >> 20).to_string());
        let mut words = environment();
        words.extend(["sh", "-c", SCRIPT, "libguestfs.sh"].map(String::from));
        words.extend([dir.path(), spec.image].map(|path| path.to_string_lossy().into_owned()));
        words.extend(memory);
        let hosted = Hosted::start("libguestfs", &words, vec![(inside, UPLOAD)], dir.path())?;
        Ok(Libguestfs {
            hosted,
            upload,
            _dir: dir,
        })
    }

    /// Returns the upload stream, and the script extended to read `mib` MiB of it as its standard
    /// input.
    ///
    /// # Errors
    /// When there are too many files open.
    pub fn way_in(&self, mib: u64, script: &str) -> Result<(UnixStream, String)> {
        let stream = self.upload.try_clone();
        let stream = stream.context(|| "cannot send data".into())?;
        Ok((stream, format!("# upload {}\n{script}", mib << 20)))
    }
}

/// Checks the specification before anything is started.
///
/// # Errors
/// When libguestfs is not installed, or does not support the cache mode.
pub fn check(cache: Cache) -> Result<()> {
    host::program(PROGRAM).map_err(|_| Error::Missing {
        what: PROGRAM.into(),
        hint: "install libguestfs (Debian's packages are guestfish and libguestfs-tools), or leave out \
               --bed libguestfs",
    })?;
    match cache {
        Cache::Writeback => Ok(()),
        Cache::None => Err(Error::Protocol(
            "--cache none: libguestfs has disks only through the page cache".into(),
        )),
    }
}

/// Builds the appliance if it does not exist yet, so that no measured start includes the build.
///
/// # Errors
/// When libguestfs fails; the error has its last messages.
pub fn prepare() -> Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let made = format!("{CACHE}/.guestfs-{user}/appliance.d/root");
    if Path::new(&made).exists() {
        return Ok(());
    }
    let mut words = environment();
    words.extend([PROGRAM, "--format=raw", "--add", "/dev/null", "run"].map(String::from));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    host::run(words[0], &words[1..]).map(drop)
}

/// Returns a command prefix with libguestfs's settings for this machine: QEMU without libvirt, and
/// emulation if /dev/kvm cannot run Linux.
fn environment() -> Vec<String> {
    let settings = match Accelerator::detect() {
        Accelerator::Kvm => "",
        Accelerator::Tcg => "force_tcg",
    };
    vec![
        "env".into(),
        "LIBGUESTFS_BACKEND=direct".into(),
        format!("LIBGUESTFS_BACKEND_SETTINGS={settings}"),
        format!("LIBGUESTFS_CACHEDIR={CACHE}"),
    ]
}
