//! How a base image's keeper is found: the process of this host that has its cache. It is started when there
//! is none.

use super::terms::Terms;
use fathom_files::gate::{self, Wanted};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Connects to the keeper; may block for [`PATIENCE`].
pub type Find = Box<dyn Fn(&Terms) -> io::Result<OwnedFd> + Send + Sync>;

static FIND: OnceLock<Find> = OnceLock::new();

/// A keeper that is started is there within this time.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// By which the program is told that it is a keeper: its terms follow in JSON.
pub const KEEPER: &str = "base-keeper";

/// Have keepers be found so from now on: by whoever may start programs. The first one stays.
pub fn install(find: Find) {
    let _ = FIND.set(find);
}

pub(super) fn find(terms: &Terms) -> io::Result<OwnedFd> {
    if let Some(gate) = gate::other() {
        let remote = terms.remote.clone();
        return Ok(gate.get(&Wanted::Base { remote }, None)?.file);
    }
    find_here(terms)
}

/// With this process's rights.
pub fn find_here(terms: &Terms) -> io::Result<OwnedFd> {
    match FIND.get() {
        Some(find) => find(terms),
        None => find_or_start(terms, &mut |child| {
            // Somebody has to hear of its end.
            std::thread::spawn(move || {
                let _ = { child }.wait();
            });
        }),
    }
}

/// Connects to the keeper, and starts one if there is none: `started` gets it.
pub fn find_or_start(terms: &Terms, started: &mut dyn FnMut(Child)) -> io::Result<OwnedFd> {
    let place = terms.place();
    let deadline = Instant::now() + PATIENCE;
    let mut is_started = false;
    loop {
        match dial(&place) {
            Err(error) if is_absent(&error) && Instant::now() < deadline => {}
            result => return result.map_err(|error| told(&place, is_started, error)),
        }
        if !is_started {
            started(start(terms).map_err(|error| told(&place, false, error))?);
            is_started = true;
        }
        sleep(Duration::from_millis(2));
    }
}

fn told(place: &Path, is_started: bool, error: io::Error) -> io::Error {
    let what = match is_started {
        true => "has not begun",
        false => "cannot be reached",
    };
    io::Error::other(format!("its keeper at {} {what}: {error}", place.display()))
}

fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound};
    matches!(error.kind(), ConnectionRefused | ConnectionReset | NotFound)
}

/// What is in a directory, whose path may be longer than a socket's can be.
pub fn socket_in(dir: &OwnedFd) -> io::Result<SocketAddrUnix> {
    let path = format!("/proc/self/fd/{}/socket", dir.as_raw_fd());
    Ok(SocketAddrUnix::new(path)?)
}

/// The directory of an image's cache.
pub fn open_place(place: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(place, flags, Mode::empty())?)
}

/// Connects to a keeper that is there.
pub fn dial(place: &Path) -> io::Result<OwnedFd> {
    let dir = open_place(place)?;
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &socket_in(&dir)?)?;
    Ok(socket)
}

fn start(terms: &Terms) -> io::Result<Child> {
    // Its users' data goes there.
    let place = terms.place();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&place)?;
    let terms = serde_json::to_string(terms)?;
    Command::new(program()?)
        .arg0("fathom-base")
        .args([KEEPER, &terms])
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // Whoever ends this process from its terminal does not mean the keeper, which others use, too.
        .process_group(0)
        .spawn()
}

/// The program that this process was started from.
fn program() -> io::Result<PathBuf> {
    Ok("/proc/self/exe".into())
}
