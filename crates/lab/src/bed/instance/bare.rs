//! This machine itself: its own programs, run by the agent.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::Given;
use super::hosted::Hosted;
use super::loop_device::{self, LoopDevice};
use crate::agent;
use crate::error::{Context, Result};
use crate::scratch::Scratch;

/// Descriptor from which the shell reads uploaded data.
const UPLOAD: i32 = 5;
/// Script that runs before the agent. The agent's own /tmp may hide the paths of the disk and the
/// program, so the script opens both before it mounts /tmp.
const OWN_FILES: &str = r#"[ -z "$1" ] || exec 6<"$1"
[ -z "$2" ] || exec 7<"$2"
mount -t tmpfs tmp /tmp; export lab_inherited=1"#;
/// Path of the disk for processes that inherit its descriptor.
const FILE: &str = "/proc/self/fd/6";
/// Path of the program for processes that inherit its descriptor.
pub const PROGRAM: &str = "/proc/self/fd/7";

/// A shell that runs scripts, and is killed on drop.
#[derive(Debug)]
pub struct Bare {
    // Fields are dropped in order: processes must end before their disk and directory are removed.
    /// Shell's process, with its agent and console.
    pub hosted: Hosted,
    /// Path of the disk under test for scripts; empty without a disk.
    pub disk: String,
    /// Stream whose data scripts read from [`UPLOAD`].
    upload: UnixStream,
    _loop: Option<LoopDevice>,
    _dir: Scratch,
}

impl Bare {
    /// Starts the shell in the network namespace of the calling thread. Scripts may call the
    /// program.
    ///
    /// # Errors
    /// When the caller is not root, or the shell does not start; the error has its last output.
    pub fn start(disk: Option<Given>, program: Option<&Path>) -> Result<Bare> {
        let dir = Scratch::small()?;
        let (disk, device, file) = match disk {
            None => (String::new(), None, Path::new("")),
            Some(Given::Device(image, cache)) => {
                let (device, path) = loop_device::block_device(image, cache)?;
                (path.to_string_lossy().into_owned(), device, Path::new(""))
            }
            Some(Given::File(image)) => (FILE.to_owned(), None, image),
        };
        let script = format!("{OWN_FILES}\n{}", agent::SCRIPT);
        let [file, program] = [file, program.unwrap_or(Path::new(""))]
            .map(|path| path.to_string_lossy().into_owned());
        let words = ["sh".into(), "-c".into(), script, "sh".into(), file, program];
        let pair = UnixStream::pair();
        let (upload, inside) = pair.context(|| "cannot make a socket".into())?;
        let hosted = Hosted::start("a shell", &words, vec![(inside, UPLOAD)], dir.path())?;
        Ok(Bare {
            hosted,
            disk,
            upload,
            _loop: device,
            _dir: dir,
        })
    }

    /// Returns the upload stream, and the script extended to read that stream as its standard
    /// input.
    ///
    /// # Errors
    /// When there are too many files open.
    pub fn way_in(&self, script: &str) -> Result<(UnixStream, String)> {
        let stream = self.upload.try_clone();
        let stream = stream.context(|| "cannot send data".into())?;
        Ok((stream, format!("exec <&{UPLOAD}\n{script}")))
    }
}
