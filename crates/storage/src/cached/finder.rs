//! Finds the keeper of a base image, the process of this host that owns the image's cache, or
//! starts one.

use super::terms::Terms;
use super::wire::{self, FromKeeper, Geometry, Identity};
use fathom_files::gate::{self, Wanted};
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Function that connects to the keeper; may block for [`PATIENCE`].
pub type Find = Box<dyn Fn(&Terms) -> io::Result<OwnedFd> + Send + Sync>;

static FIND: OnceLock<Find> = OnceLock::new();

/// Function that compares the image announced by a keeper with the manifest that the terms name.
/// The error is one line.
pub type Check = fn(&Terms, &Geometry, &Identity) -> Result<(), String>;

static CHECK: OnceLock<Check> = OnceLock::new();

/// Timeout for a keeper's first message. A new keeper must first contact the remote.
pub(super) const WELCOME: Duration = Duration::from_secs(30);

/// Timeout for a new keeper's start.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Interval between the first and the second start of a keeper.
const FIRST_INTERVAL: Duration = Duration::from_millis(10);

/// Number of times that this interval is doubled.
const MOST_DOUBLINGS: u32 = 7;

/// Timeout for a keeper to accept a connection.
const DIAL: Duration = Duration::from_secs(2);

/// First argument of a keeper's command line. The second argument is the keeper's directory, for
/// people who list processes. The terms are passed as JSON on standard input, because they may be
/// secret.
pub const KEEPER: &str = "base-keeper";

/// Sets the function that finds keepers, by a process that may start programs. Only the first call
/// has an effect.
pub fn install(find: Find) {
    let _ = FIND.set(find);
}

/// Sets the function that checks keepers' first messages. Only the first call has an effect.
pub fn install_check(check: Check) {
    let _ = CHECK.set(check);
}

pub(super) fn find(terms: &Terms) -> io::Result<OwnedFd> {
    if let Some(gate) = gate::other() {
        let remote = terms.remote.clone();
        return Ok(gate.get(&Wanted::Base { remote }, None)?.file);
    }
    find_here(terms)
}

/// Finds a keeper with this process's privileges, with which the manifest is read, too.
pub fn find_here(terms: &Terms) -> io::Result<OwnedFd> {
    let keeper = find_any(terms)?;
    if terms.cache.manifest.is_some() {
        check_greeting(terms, &keeper)?;
    }
    Ok(keeper)
}

/// Refuses a keeper that was started on other terms and does not check what it fetches against this
/// manifest.
fn check_greeting(terms: &Terms, keeper: &OwnedFd) -> io::Result<()> {
    let mut polled = [PollFd::new(keeper, PollFlags::IN)];
    let limit = Timespec::try_from(WELCOME).map_err(io::Error::other)?;
    if rustix::event::poll(&mut polled, Some(&limit))? == 0 {
        return Err(io::Error::other("no message from the cache's keeper"));
    }
    // The receiver of the message handles all other messages and the end of the connection.
    let Ok(FromKeeper::Welcome(geometry, identity)) = wire::peek(keeper) else {
        return Ok(());
    };
    let check = CHECK.get();
    let check = check.ok_or_else(|| io::Error::other("this process cannot check manifests"))?;
    check(terms, &geometry, &identity).map_err(io::Error::other)
}

fn find_any(terms: &Terms) -> io::Result<OwnedFd> {
    match FIND.get() {
        Some(find) => find(terms),
        None => find_or_start(terms, &mut |child| {
            // A thread must reap the child when it ends.
            std::thread::spawn(move || {
                let _ = { child }.wait();
            });
        }),
    }
}

/// Connects to the keeper, and starts a keeper if none is running. `started` receives the processes
/// that were started.
pub fn find_or_start(terms: &Terms, started: &mut dyn FnMut(Child)) -> io::Result<OwnedFd> {
    let place = terms.place();
    let deadline = Instant::now() + PATIENCE;
    let mut child: Option<Child> = None;
    let mut starts = Starts::default();
    let found = loop {
        match dial(&place) {
            Err(error) if is_absent(&error) && Instant::now() < deadline => {}
            result => break result.map_err(|error| told(&place, child.is_some(), error)),
        }
        // The process may have ended because it found another keeper, which has ended since.
        let is_there = child
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        if !is_there && starts.is_due(Instant::now()) {
            match start(terms) {
                Ok(new) => child.replace(new).into_iter().for_each(&mut *started),
                Err(error) => break Err(told(&place, false, error)),
            }
        }
        sleep(Duration::from_millis(5));
    };
    child.into_iter().for_each(started);
    found
}

/// Limits how often a keeper that ends at once is started again.
#[derive(Default)]
struct Starts {
    count: u32,
    next: Option<Instant>,
}

impl Starts {
    /// Returns whether a keeper may be started now, and if so counts the start. The interval to the
    /// next start is doubled each time.
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next.is_none_or(|next| next <= now);
        if is_due {
            self.next = Some(now + FIRST_INTERVAL * (1 << self.count));
            self.count = (self.count + 1).min(MOST_DOUBLINGS);
        }
        is_due
    }
}

fn told(place: &Path, is_started: bool, error: io::Error) -> io::Error {
    let what = match is_started {
        true => "has not started",
        false => "does not respond",
    };
    io::Error::other(format!(
        "its keeper at {} {what}: {}",
        place.display(),
        cause(error)
    ))
}

fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound};
    matches!(error.kind(), ConnectionRefused | ConnectionReset | NotFound)
}

/// Returns the address of a directory's socket. The directory's path may be longer than a socket
/// address.
pub fn socket_in(dir: &OwnedFd) -> io::Result<SocketAddrUnix> {
    let path = format!("/proc/self/fd/{}/socket", dir.as_raw_fd());
    Ok(SocketAddrUnix::new(path)?)
}

/// Opens the directory of an image's cache.
pub fn open_place(place: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(place, flags, Mode::empty())?)
}

/// Connects to a running keeper.
pub fn dial(place: &Path) -> io::Result<OwnedFd> {
    let dir = open_place(place)?;
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    // A keeper that accepts no connections must not delay callers that look for several keepers.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(DIAL))?;
    connect(&socket, &socket_in(&dir)?)?;
    Ok(socket)
}

fn start(terms: &Terms) -> io::Result<Child> {
    // The directory will hold users' data, so only its owner may access it.
    let place = terms.place();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&place)?;
    let mut child = Command::new("/proc/self/exe")
        .arg0("fathom-base")
        .arg(KEEPER)
        .arg(&place)
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        // Signals from the terminal must not end the keeper, which other processes use, too.
        .process_group(0)
        .spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // The terms fit into the pipe's buffer. If the child has ended, `find_or_start` notices.
        let _ = input.write_all(&serde_json::to_vec(terms)?);
    }
    Ok(child)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeper_that_ends_at_once_is_started_a_few_times() {
        let (mut starts, begin) = (Starts::default(), Instant::now());
        let ticks = (0..PATIENCE.as_millis() as u64 / 5).map(|n| Duration::from_millis(5 * n));
        let count = ticks.filter(|after| starts.is_due(begin + *after)).count();
        assert!((2..20).contains(&count), "{count}");
    }
}
