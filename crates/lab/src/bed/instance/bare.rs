//! This machine itself: its own programs, run by the agent.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::Given;
use super::hosted::Hosted;
use super::loop_device::{self, LoopDevice};
use crate::agent;
use crate::error::{Context, Result};
use crate::scratch::Scratch;

/// The descriptor from which is read what is sent.
const UPLOAD: i32 = 5;
/// Before the agent: its files are in a place of its own, which may be in front of the disk's and of
/// the program's.
const OWN_FILES: &str = r#"[ -z "$1" ] || exec 6<"$1"
[ -z "$2" ] || exec 7<"$2"
mount -t tmpfs tmp /tmp; export lab_inherited=1"#;
/// The disk, and the program, for who inherits the descriptors.
const FILE: &str = "/proc/self/fd/6";
pub const PROGRAM: &str = "/proc/self/fd/7";

/// A shell that runs scripts. It is killed on drop.
#[derive(Debug)]
pub struct Bare {
    // Fields are dropped in order: processes go before their disk and directory.
    pub hosted: Hosted,
    /// The disk under test, as scripts have to name it; empty without.
    pub disk: String,
    /// What is written here is read from [`UPLOAD`].
    upload: UnixStream,
    _loop: Option<LoopDevice>,
    _dir: Scratch,
}

impl Bare {
    /// Starts it, in the network of the thread that does. Scripts may call the program.
    ///
    /// # Errors
    /// Without root's rights, or when it does not come up, with its last words.
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

    /// The way in, and a script that has it for its standard input.
    ///
    /// # Errors
    /// When there are too many files open.
    pub fn way_in(&self, script: &str) -> Result<(UnixStream, String)> {
        let stream = self.upload.try_clone();
        let stream = stream.context(|| "cannot send data".into())?;
        Ok((stream, format!("exec <&{UPLOAD}\n{script}")))
    }
}
