//! The process that is to take over.

use super::starter::{Started, Starter};
use super::wire::Peer;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// By which `fathom serve` is told that its standard input is a predecessor.
pub const TAKE_OVER: &str = "--take-over";

/// Killed when it is dropped, and waited for: after that it does nothing any more.
pub struct Successor<'a> {
    process: Started<'a>,
    pub peer: Peer,
    is_needed: bool,
}

impl Successor<'_> {
    /// Start it. The error is for the user.
    pub fn start(starter: &Starter, binary: Option<PathBuf>) -> Result<Successor<'_>, String> {
        let failed = |error| format!("a successor cannot be started: {error}");
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let peer = Peer::new(ours).map_err(failed)?;
        Ok(Successor {
            process: starter.start(binary, theirs.into())?,
            peer,
            is_needed: false,
        })
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// It serves: it is to outlive this process.
    pub fn let_live(&mut self) {
        self.is_needed = true;
    }
}

impl Drop for Successor<'_> {
    fn drop(&mut self) {
        if !self.is_needed {
            self.process.kill();
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
