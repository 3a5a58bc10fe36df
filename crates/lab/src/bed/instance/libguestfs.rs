//! An appliance of libguestfs: a small Debian that supermin makes of this machine's packages, in a
//! virtual machine that libguestfs starts. guestfish is all that talks to it: a script on this machine
//! answers for the agent.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::hosted::Hosted;
use super::{Cache, Spec};
use crate::error::{Context, Error, Result};
use crate::host::{self, Accelerator};
use crate::scratch::Scratch;

/// How scripts for libguestfs are run.
pub const PROGRAM: &str = "guestfish";
/// The disk under test inside.
pub const DISK: &str = "/dev/sda";
/// The descriptor of the script's from which is read what is sent.
const UPLOAD: i32 = 5;
const SCRIPT: &str = include_str!("libguestfs.sh");
/// Where appliances are kept that have been made.
const CACHE: &str = "/var/tmp";

/// An appliance that runs. It is killed on drop.
#[derive(Debug)]
pub struct Libguestfs {
    // Fields are dropped in order: processes go before their directory.
    pub hosted: Hosted,
    upload: UnixStream,
    _dir: Scratch,
}

impl Libguestfs {
    /// Starts it.
    ///
    /// # Errors
    /// When libguestfs is not installed, or the appliance does not come up, with its last words.
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

    /// The way in, and a script that has so many MiB from it for its standard input.
    ///
    /// # Errors
    /// When there are too many files open.
    pub fn way_in(&self, mib: u64, script: &str) -> Result<(UnixStream, String)> {
        let stream = self.upload.try_clone();
        let stream = stream.context(|| "cannot send data".into())?;
        Ok((stream, format!("# upload {}\n{script}", mib << 20)))
    }
}

/// What can be said before anything is started.
///
/// # Errors
/// When libguestfs is not there, or cannot do it.
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

/// Makes the appliance where none has been made yet: no start-up is to be measured with that in it.
///
/// # Errors
/// With libguestfs's last words.
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

/// A command with what libguestfs has to know of this machine: QEMU without libvirt, and emulation
/// where there is a /dev/kvm that runs no Linux.
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
