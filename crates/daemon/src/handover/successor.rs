//! The process that is to take over.

use super::wire::Peer;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// By which `fathom serve` is told that its standard input is a predecessor.
pub const TAKE_OVER: &str = "--take-over";

/// Killed when it is dropped, and waited for: after that it does nothing any more.
pub struct Successor {
    child: Child,
    pub peer: Peer,
    is_needed: bool,
}

impl Successor {
    /// Start it, with the arguments of this process.
    pub fn start(binary: &Path, arguments: &[OsString]) -> io::Result<Successor> {
        let (ours, theirs) = UnixStream::pair()?;
        let is_new = |argument: &&OsString| *argument != TAKE_OVER;
        let mut arguments = arguments.iter().filter(is_new);
        let mut command = Command::new(binary);
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        let mut arguments: Vec<_> = arguments.collect();
        let take_over = OsString::from(TAKE_OVER);
        // Behind the name of the command: what follows may be anything.
        arguments.insert(arguments.len().min(1), &take_over);
        // What a service manager has passed comes from this process: by this it is known that there
        // was something.
        command.args(arguments).env("LISTEN_FDS", "0");
        let child = command.stdin(OwnedFd::from(theirs)).spawn()?;
        Ok(Successor {
            child,
            peer: Peer::new(ours)?,
            is_needed: false,
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// It serves: it is to outlive this process.
    pub fn let_live(&mut self) {
        self.is_needed = true;
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if !self.is_needed {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The file that is now where this process was started from.
pub fn own_binary() -> io::Result<PathBuf> {
    let path = fs::read_link("/proc/self/exe")?.into_os_string().into_vec();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(&path);
    Ok(std::ffi::OsStr::from_bytes(path).into())
}

/// Refuse a program that somebody else could have made. Those whom a group lets use the API may not
/// have anything run.
pub fn check_binary(path: &Path) -> Result<(), String> {
    let shown = path.display();
    if !path.is_absolute() {
        return Err(format!("{shown}: give the whole path of the program"));
    }
    let meta = fs::metadata(path).map_err(|error| format!("{shown}: {error}"))?;
    let own = rustix::process::geteuid().as_raw();
    let is_ours = [0, own].contains(&meta.uid()) && meta.mode() & 0o002 == 0;
    match is_ours && meta.is_file() {
        true => Ok(()),
        false => Err(format!(
            "{shown}: a successor is a file of root's or of the server's user that others cannot \
             write to"
        )),
    }
}
