//! Mounts and unmounts the file, by `fusermount3`.
//!
//! `fusermount3` gets a socket, over which it sends `/dev/fuse`, connected to the new mount. With
//! the option `auto_unmount` the program then waits until the other end of the socket is closed,
//! and unmounts the file. The kernel closes that end when this process ends. (`fusermount3`
//! unmounts only a mount without a server, so `/dev/fuse` must be closed first.)

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, recvmsg, shutdown,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The program that may mount for every user.
const PROGRAM: &str = "fusermount3";

/// Mounts with the options `$1` over the file `$2`, waits for the end of the server, and unmounts.
///
/// For users other than root: before `auto_unmount` unmounts, `fusermount3` opens the file as root
/// to see that the server has ended, and the kernel admits only the user.
const MOUNT_AND_UNMOUNT: &str = "trap '' TERM INT HUP
    fusermount3 -o \"$1\" -- \"$2\" && exec fusermount3 -u -q -z -- \"$2\"";

const MISSING: &str = "the program fusermount3 is missing; install the package fuse3";

const NOT_EMPTY: &str = "the file is not empty, and the mount would hide its data; name an empty \
                         regular file";

/// Timeout for `fusermount3`, to mount and to unmount.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of a message of `fusermount3`, in bytes.
const MAX_MESSAGE: usize = 1024;

/// An order to mount a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounting {
    /// The mount point, an empty regular file, without symbolic links.
    pub file: PathBuf,
    /// Whether the file can only be read.
    pub read_only: bool,
}

/// Function that starts `fusermount3` with this socket, as [`launch`] does, in a process that may
/// start programs.
pub type Launch = Box<dyn Fn(&Mounting, OwnedFd) -> io::Result<()> + Send + Sync>;

static LAUNCH: OnceLock<Launch> = OnceLock::new();

/// Sets the function that starts `fusermount3`. Only the first call has an effect.
pub fn install_launcher(launch: Launch) {
    let _ = LAUNCH.set(launch);
}

/// Starts `fusermount3`. The caller must reap the child, which ends when the file is unmounted.
///
/// The process that gives the order may be controlled by an attacker. Therefore this function
/// checks again that the mount hides no data of a file.
///
/// # Errors
/// When the mount point is no empty regular file, or the program cannot be started.
pub fn launch(mounting: &Mounting, socket: OwnedFd) -> io::Result<Child> {
    let metadata = mounting.file.symlink_metadata()?;
    if !metadata.is_file() || metadata.len() > 0 {
        return Err(io::Error::other(NOT_EMPTY));
    }
    let mut options = "auto_unmount,nosuid,nodev,noexec,fsname=fathom,subtype=fathom".to_owned();
    if mounting.read_only {
        options.push_str(",ro");
    }
    let is_root = rustix::process::geteuid().is_root();
    let mut command = Command::new(if is_root { PROGRAM } else { "sh" });
    match is_root {
        true => command.args(["-o", &options, "--"]),
        false => command.args(["-c", MOUNT_AND_UNMOUNT, "sh", &options]),
    };
    let started = command
        .arg(&mounting.file)
        // The socket is descriptor 0. Errors go over it, too.
        .env("_FUSE_COMMFD", "0")
        .stderr(Stdio::from(socket.try_clone()?))
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .current_dir("/")
        .spawn();
    started.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(io::ErrorKind::NotFound, MISSING),
        _ => error,
    })
}

/// A mounted file.
#[derive(Debug)]
pub struct Mounted {
    file: PathBuf,
    /// `/dev/fuse`, connected to the mount, until a session has it.
    device: Option<OwnedFd>,
    /// The socket to `fusermount3`, which ends when the file is unmounted.
    socket: UnixStream,
}

impl Mounted {
    /// Mounts `file`, which must be a regular file and no mount point. `is_used` tells whether the
    /// disk itself has the file of this device and inode open.
    ///
    /// # Errors
    /// One line for the user.
    pub fn new(
        file: &Path,
        read_only: bool,
        is_used: impl FnOnce(u64, u64) -> bool,
    ) -> Result<Mounted, String> {
        let named = |problem: &str| format!("{}: cannot mount the disk: {problem}", file.display());
        let file = check_mount_point(file, is_used).map_err(|problem| named(&problem))?;
        let mounting = Mounting { file, read_only };
        let (socket, theirs) = UnixStream::pair().map_err(|error| named(&cause(&error)))?;
        let started = match LAUNCH.get() {
            Some(launch) => launch(&mounting, theirs.into()),
            None => launch(&mounting, theirs.into()).map(reap_later),
        };
        started.map_err(|error| named(&cause(&error)))?;
        let device = receive_device(&socket).map_err(|problem| named(&problem))?;
        Ok(Mounted {
            file: mounting.file,
            device: Some(device),
            socket,
        })
    }

    /// Returns the mount point.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns `/dev/fuse`, connected to the mount. `None`: already taken.
    pub(super) fn take_device(&mut self) -> Option<OwnedFd> {
        self.device.take()
    }

    /// Unmounts the file, for which all duplicates of `/dev/fuse` must have been closed. Returns
    /// false if the file is still mounted after a timeout.
    pub(super) fn unmount(mut self) -> bool {
        drop(self.device.take());
        let _ = shutdown(&self.socket, Shutdown::Write);
        self.wait_for_program() && !is_mount_point(&self.file)
    }

    /// Waits until `fusermount3` has ended. Returns false after a timeout.
    fn wait_for_program(&mut self) -> bool {
        let deadline = Instant::now() + TIMEOUT;
        while is_readable(&self.socket, deadline) {
            match self.socket.read(&mut [0; MAX_MESSAGE]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        false
    }
}

fn cause(error: &io::Error) -> String {
    fathom_units::cause(error)
}

/// Waits for the end of a child process on a thread, so that no zombie remains.
fn reap_later(mut child: Child) {
    std::thread::spawn(move || child.wait());
}

/// Returns the path of a mount point without symbolic links. The error follows the path.
fn check_mount_point(
    file: &Path,
    is_used: impl FnOnce(u64, u64) -> bool,
) -> Result<PathBuf, String> {
    let found = file.canonicalize().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "no such file; create an empty file there first".to_owned(),
        _ => cause(&error),
    })?;
    let metadata = found.metadata().map_err(|error| cause(&error))?;
    if !metadata.is_file() {
        return Err("not a regular file; name an existing regular file".into());
    }
    if is_mount_point(&found) {
        return Err("already a mount point; unmount it first, or name another file".into());
    }
    if is_used(metadata.dev(), metadata.ino()) {
        return Err("a file of the disk's own image; name another file".into());
    }
    match metadata.len() {
        0 => Ok(found),
        _ => Err(NOT_EMPTY.into()),
    }
}

/// Returns whether something is mounted at `path`, which may be a file whose server has ended.
/// (Linux reports the root of a mount since version 5.8.)
fn is_mount_point(path: &Path) -> bool {
    let found = statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::TYPE);
    match found {
        Ok(found) => found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        Err(error) => error == rustix::io::Errno::NOTCONN,
    }
}

/// Waits until `socket` is readable, and returns false at `deadline`.
fn is_readable(socket: &UnixStream, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], left.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result == Ok(1),
        }
    }
}

/// Receives `/dev/fuse` from `fusermount3`. The error is what the program said instead.
fn receive_device(socket: &UnixStream) -> Result<OwnedFd, String> {
    let deadline = Instant::now() + TIMEOUT;
    let mut said = Vec::new();
    loop {
        if !is_readable(socket, deadline) {
            return Err(format!("{PROGRAM} did not respond within 10 s"));
        }
        let mut bytes = [0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut files = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(socket, into, &mut files, RecvFlags::CMSG_CLOEXEC);
        let len = match received {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(cause(&error.into())),
        };
        for message in files.drain() {
            if let RecvAncillaryMessage::ScmRights(mut files) = message
                && let Some(device) = files.next()
            {
                return Ok(device);
            }
        }
        said.extend_from_slice(&bytes[..len]);
        if len == 0 || said.len() > MAX_MESSAGE {
            return Err(first_line(&said));
        }
    }
}

/// Returns the first line that `fusermount3` has said.
fn first_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let line = said.lines().map(str::trim).find(|line| !line.is_empty());
    match line {
        Some(line) if line.contains("not found") => MISSING.to_owned(),
        Some(line) => line.to_owned(),
        None => format!("{PROGRAM} failed without a message"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_point_is_a_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let check = |path: &Path| check_mount_point(path, |_, _| false).unwrap_err();
        assert!(check(&dir.path().join("none")).contains("no such file"));
        assert!(check(dir.path()).contains("not a regular file"));
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let used = check_mount_point(&file, |_, _| true).unwrap_err();
        assert!(used.contains("disk's own image"), "{used}");
        let found = check_mount_point(&file, |_, _| false).unwrap();
        assert_eq!(found, file.canonicalize().unwrap());
        std::fs::write(&file, "data").unwrap();
        assert_eq!(check(&file), NOT_EMPTY);
    }

    #[test]
    fn program_is_not_started_over_data() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "data").unwrap();
        std::os::unix::fs::symlink(dir.path().join("empty"), &link).unwrap();
        std::fs::write(dir.path().join("empty"), "").unwrap();
        for file in [file, link] {
            let mounting = Mounting {
                file,
                read_only: true,
            };
            let (_ours, theirs) = UnixStream::pair().unwrap();
            let error = launch(&mounting, theirs.into()).unwrap_err();
            assert_eq!(error.to_string(), NOT_EMPTY);
        }
    }

    #[test]
    fn errors_of_the_program_are_one_line() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        io::Write::write_all(&mut { theirs }, b"fusermount3: no\nmore\n").unwrap();
        assert_eq!(receive_device(&ours).unwrap_err(), "fusermount3: no");
        assert!(first_line(b"\n").contains("without a message"));
    }
}
