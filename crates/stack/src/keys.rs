//! The sources of keys for encrypted images. Keys themselves are never passed as options, where
//! arguments, option files and logs would reveal them.

use fathom_files::gate;
use fathom_formats::served::Keys;
use fathom_luks::{MAX_PASSPHRASE, Passphrase};
use fathom_units::cause;
use parking_lot::Mutex;
use std::env;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use zeroize::Zeroizing;

/// The source of a key. All bytes count, but the last line break of a command's output does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A regular file.
    File(PathBuf),
    /// An inherited descriptor: a file is read from its start, a pipe to its end.
    Descriptor(RawFd),
    /// A systemd credential of this service (LoadCredential= and similar settings).
    Credential(String),
    /// The output of a program, given as in a shell.
    Command(String),
}

impl FromStr for KeySource {
    type Err = String;

    fn from_str(text: &str) -> Result<KeySource, String> {
        let kinds = "fd:N, file:PATH, credential:NAME or command:PROGRAM";
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        match (kind, rest) {
            // The text is not shown, because it may be the key itself.
            _ if rest.is_empty() => Err(format!("not a key's source; write {kinds}")),
            ("file", path) => Ok(KeySource::File(path.into())),
            ("fd", number) => match number.parse() {
                Ok(fd) if fd >= 0 => Ok(KeySource::Descriptor(fd)),
                _ => Err("fd:N needs the number of a file descriptor".into()),
            },
            ("credential", name) if name.contains('/') => {
                Err("credential:NAME needs a name without slashes".into())
            }
            ("credential", name) => Ok(KeySource::Credential(name.into())),
            ("command", command) => match shlex::split(command) {
                Some(words) if !words.is_empty() => Ok(KeySource::Command(command.into())),
                _ => Err("command:PROGRAM: a quote is not closed".into()),
            },
            _ => Err(format!("not a key's source; write {kinds}")),
        }
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeySource::File(path) => write!(f, "file:{}", path.display()),
            KeySource::Descriptor(fd) => write!(f, "fd:{fd}"),
            KeySource::Credential(name) => write!(f, "credential:{name}"),
            KeySource::Command(command) => write!(f, "command:{command}"),
        }
    }
}

impl KeySource {
    /// Returns the path if the key is in a file.
    pub fn path(&self) -> Option<&Path> {
        match self {
            KeySource::File(path) => Some(path),
            _ => None,
        }
    }

    /// Returns the path, to be changed, if the key is in a file.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            KeySource::File(path) => Some(path),
            _ => None,
        }
    }

    /// Returns whether each process of a service can read the key at any time.
    ///
    /// Returns false for descriptors and programs.
    pub fn is_anywhere(&self) -> bool {
        matches!(self, KeySource::File(_) | KeySource::Credential(_))
    }

    /// Reads the key. May wait for the program. The error is one line for the user.
    pub fn read(&self) -> Result<Passphrase, String> {
        Passphrase::new(self.bytes()?).map_err(|error| format!("key {self}: {}", cause(error)))
    }

    fn bytes(&self) -> Result<Vec<u8>, String> {
        let told = |error: io::Error| format!("cannot read the key {self}: {}", cause(error));
        match self {
            KeySource::File(path) => read_file(path.clone()),
            KeySource::Credential(name) => {
                let dir = env::var_os("CREDENTIALS_DIRECTORY").ok_or_else(|| {
                    format!(
                        "{self}: this process has no credentials, which systemd gives to services"
                    )
                })?;
                read_file(PathBuf::from(dir).join(name))
            }
            KeySource::Descriptor(fd) => {
                File::open(format!("/proc/self/fd/{fd}")).and_then(read_all)
            }
            KeySource::Command(command) => run(command),
        }
        .map_err(told)
    }
}

/// Reads a regular file. Rejects pipes and devices, which might block.
fn read_file(path: PathBuf) -> io::Result<Vec<u8>> {
    let mut options = File::options();
    let file = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => read_all(file),
        false => Err(io::Error::other("not a regular file; pass it as fd:N")),
    }
}

/// Reads into a buffer that is never reallocated, so that no copy of the key remains.
fn read_all(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(MAX_PASSPHRASE + 1);
    from.take(MAX_PASSPHRASE as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn run(command: &str) -> io::Result<Vec<u8>> {
    let words = shlex::split(command).unwrap_or_default();
    let mut words = words.iter();
    let mut child = Command::new(words.next().map_or("", String::as_str))
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let bytes = child.stdout.take().map(read_all);
    let status = child.wait()?;
    let mut bytes = Zeroizing::new(bytes.unwrap_or_else(|| Ok(Vec::new()))?);
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    match status.success() {
        true => Ok(std::mem::take(&mut *bytes)),
        false => Err(io::Error::other(format!("the program ended with {status}"))),
    }
}

/// The keys of a disk, read at first use. Clones share the keys and what was derived from them.
#[derive(Clone, Debug, Default)]
pub struct KeyRing {
    sources: Vec<KeySource>,
    keys: Arc<Mutex<Option<Keys>>>,
}

impl KeyRing {
    /// Creates a key ring. Keys are read at their first use.
    pub fn new(sources: Vec<KeySource>) -> KeyRing {
        KeyRing {
            sources,
            keys: Arc::default(),
        }
    }

    /// Returns whether the ring has no sources, so that no image can be unlocked.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Returns whether reading the keys starts programs.
    pub fn run_programs(&self) -> bool {
        { self.sources.iter() }.any(|source| matches!(source, KeySource::Command(_)))
    }

    /// Returns `other`, which may have read its keys already, if it has the same sources.
    pub fn or(self, other: &KeyRing) -> KeyRing {
        match self.sources == other.sources {
            true => other.clone(),
            false => self,
        }
    }

    /// Returns the keys. The error is one line for the user.
    pub fn keys(&self) -> Result<Keys, String> {
        if self.is_empty() {
            return Ok(Keys::default());
        }
        if gate::other().is_some() {
            return Err("a tenant's disk cannot be encrypted".into());
        }
        let mut keys = self.keys.lock();
        if let Some(keys) = &*keys {
            return Ok(keys.clone());
        }
        let read: Result<Vec<_>, _> = self.sources.iter().map(KeySource::read).collect();
        Ok(keys.insert(Keys::new(read?)).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;

    fn source(text: &str) -> KeySource {
        text.parse().unwrap()
    }

    #[test]
    fn sources_are_read_as_they_are_written() {
        for text in [
            "file:/a b",
            "fd:3",
            "credential:disk",
            "command:pass show 'x y'",
        ] {
            assert_eq!(source(text).to_string(), text);
        }
        for text in [
            "",
            "secret",
            "secret:x",
            "fd:",
            "fd:-1",
            "fd:x",
            "file:",
            "credential:a/b",
            "command:'",
        ] {
            let error = text.parse::<KeySource>().unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn keys_come_from_where_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "a\nb\n").unwrap();
        let file = KeySource::File(path.clone());
        assert_eq!(file.bytes().unwrap(), b"a\nb\n");
        let open = File::open(&path).unwrap();
        let fd = KeySource::Descriptor(open.as_raw_fd());
        assert_eq!(fd.bytes().unwrap(), b"a\nb\n");
        let command = source(&format!("command:cat {}", path.display()));
        assert_eq!(command.bytes().unwrap(), b"a\nb");
        assert!(source("command:true").read().unwrap_err().contains("empty"));
        assert!(source("command:false").read().is_err());
        assert!(source("command:/nowhere").read().is_err());
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert!(KeySource::File(pipe).read().unwrap_err().contains("fd:N"));
        assert!(KeySource::File(dir.path().into()).read().is_err());
    }

    #[test]
    fn a_ring_reads_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let ring = KeyRing::new(vec![KeySource::File(path.clone())]);
        assert!(ring.keys().is_err());
        fs::write(&path, "secret").unwrap();
        ring.keys().unwrap();
        fs::remove_file(&path).unwrap();
        let again = KeyRing::new(vec![KeySource::File(path)]);
        assert!(again.keys().is_err());
        again.or(&ring).keys().unwrap();
        assert!(!format!("{ring:?}").contains("secret"));
    }
}
