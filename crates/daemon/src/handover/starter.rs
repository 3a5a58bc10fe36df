//! Who starts a successor: this process; or, where its cage lets it start no program, a process that
//! was started before it had one, and which a successor's cage is not built upon.

use super::program::{check_binary, own_binary};
use fathom_host::Error;
use fathom_host::link::Link;
use fathom_sandbox::Mode;
use fathom_storage::cached::Terms;
use fathom_storage::cached::finder::{Find, find_or_start};
use fathom_units::cause;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// By which `fathom serve` is told that its standard input is a predecessor.
pub const TAKE_OVER: &str = "--take-over";

/// The starter has so long for its answer: longer than a keeper has to begin.
const PATIENCE: Duration = Duration::from_secs(15);

/// Starts successors, with the arguments that this process was started with.
pub struct Starter {
    arguments: Vec<OsString>,
    /// The other process.
    apart: Option<Arc<Apart>>,
}

/// Held from an order to its outcome.
pub type Apart = Mutex<(Link, u64)>;

/// To the other process; the first one comes with the successor's standard input.
#[derive(Serialize, Deserialize)]
enum Order {
    Start(Option<PathBuf>),
    Kill,
    /// Find this base image's keeper, or start it: the outcome comes with a connection.
    Base(Terms),
}

/// The successor's process id, or one line for the user; of one that was killed, that it was.
type Outcome = Result<u32, String>;

/// A process that has been started.
pub enum Started<'a> {
    Here(Child),
    Apart(&'a Apart, u32),
    /// By somebody else, who ends it if he is told to.
    Elsewhere(Box<dyn FnMut() -> Result<(), String> + 'a>),
}

impl Starter {
    /// Before the cage is entered.
    pub fn new(arguments: Vec<OsString>, sandbox: Mode) -> Result<Starter, Error> {
        let apart = (sandbox != Mode::Off).then(|| apart(&arguments, sandbox));
        let apart = apart.transpose();
        let apart = apart.map_err(Error::io("cannot start the process that starts successors"))?;
        let apart = apart.map(|link| Arc::new(Mutex::new((link, 0))));
        Ok(Starter { arguments, apart })
    }

    /// Who finds the keepers of base images, which are shut in like this.
    pub fn finder(&self, sandbox: Mode) -> Find {
        let (apart, sandbox) = (self.apart.clone(), sandbox.to_string());
        Box::new(move |terms| {
            let terms = Terms {
                sandbox: sandbox.clone(),
                ..terms.clone()
            };
            let Some(apart) = &apart else {
                return find_or_start(&terms, &mut reap_later);
            };
            let done = order(apart, &Order::Base(terms), None).map_err(io::Error::other)?;
            done.1.ok_or_else(|| {
                io::Error::other("no connection to the process that keeps file descriptors")
            })
        })
    }

    /// Start it, with this as its standard input. The error is for the user.
    pub fn start(&self, binary: Option<PathBuf>, input: OwnedFd) -> Result<Started<'_>, String> {
        let Some(link) = &self.apart else {
            return launch(binary, &self.arguments, input).map(Started::Here);
        };
        let (pid, _) = order(link, &Order::Start(binary), Some(input))?;
        Ok(Started::Apart(link, pid))
    }
}

impl Started<'_> {
    /// 0: whoever has started it knows.
    pub fn pid(&self) -> u32 {
        match self {
            Started::Here(child) => child.id(),
            Started::Apart(_, pid) => *pid,
            Started::Elsewhere(_) => 0,
        }
    }

    /// After this it does nothing any more.
    pub fn kill(&mut self) {
        let killed = match self {
            Started::Here(child) => {
                let _ = child.kill();
                child.wait().map(drop).map_err(cause)
            }
            Started::Apart(link, _) => order(link, &Order::Kill, None).map(drop),
            Started::Elsewhere(kill) => kill(),
        };
        if let Err(problem) = killed {
            // It may have the disks: two that write to them would be the end of them.
            tracing::error!(
                "upgrade: cannot end the failed new process: {problem}; this server ends"
            );
            std::process::exit(1);
        }
    }
}

fn apart(arguments: &[OsString], sandbox: Mode) -> io::Result<Link> {
    let (link, theirs) = Link::pair()?;
    Command::new("/proc/self/exe")
        // Whoever looks for servers by their program's name does not mean this.
        .arg0("fathom-starter")
        .args(["starter", sandbox.name(), "--"])
        .args(arguments)
        .stdin(theirs)
        // What a terminal has to say is said to the server.
        .process_group(0)
        .spawn()?;
    Ok(link)
}

/// Somebody has to hear of its end.
fn reap_later(mut child: Child) {
    std::thread::spawn(move || child.wait());
}

fn order(
    apart: &Apart,
    order: &Order,
    with: Option<OwnedFd>,
) -> Result<(u32, Option<OwnedFd>), String> {
    let mut apart = apart.lock().unwrap_or_else(PoisonError::into_inner);
    let (link, number) = &mut *apart;
    *number += 1;
    let failed = |error: io::Error| format!("the process that starts successors: {}", cause(error));
    link.send(&(*number, order), with.as_ref().map(AsFd::as_fd), false)
        .map_err(failed)?;
    drop(with);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        // (A signal may have ended the wait.)
        if !link.has_message(left) {
            continue;
        }
        match link.receive::<(u64, Outcome)>(false).map_err(failed)? {
            Some(((of, outcome), with)) if of == *number => return Ok((outcome?, with)),
            // To an order that nobody waits for any more.
            Some(_) | None => {}
        }
    }
}

/// The other process's whole life: do what comes on standard input, until the server there has ended.
/// `sandbox`: of the keepers of base images that it starts, whatever is said.
pub fn start_successors(sandbox: Mode, arguments: &[OsString]) -> Result<(), Error> {
    // Started by way of /proc, it has a name of that. (This one is for people only.)
    let _ = rustix::thread::set_name(c"fathom-starter");
    // Sockets that a service manager has passed are the server's.
    // SAFETY: nothing here has opened a file yet but the standard streams.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    let link = io::stdin().as_fd().try_clone_to_owned();
    let link = Link::from(link.map_err(Error::io("the server has ended"))?);
    let mut child: Option<Child> = None;
    let mut keepers: Vec<Child> = Vec::new();
    // An error is the server's end.
    while let Ok(Some(((number, order), input))) = link.receive::<(u64, Order)>(true) {
        keepers.retain_mut(|keeper| !matches!(keeper.try_wait(), Ok(Some(_))));
        let mut found = None;
        let outcome: Outcome = match (order, input) {
            (Order::Base(terms), _) => {
                let sandbox = sandbox.to_string();
                let terms = Terms { sandbox, ..terms };
                match find_or_start(&terms, &mut |keeper| keepers.push(keeper)) {
                    Ok(connection) => {
                        found = Some(connection);
                        Ok(0)
                    }
                    Err(error) => Err(cause(error)),
                }
            }
            (Order::Start(binary), Some(input)) => {
                let started = launch(binary, arguments, input);
                started.map(|started| child.insert(started).id())
            }
            (Order::Start(_), None) => Err("the successor has no standard input".into()),
            (Order::Kill, _) => match child.take() {
                None => Err("no successor is running".into()),
                Some(mut child) => {
                    let _ = child.kill();
                    let killed = child.wait().map_err(cause);
                    killed.map(|_| child.id())
                }
            },
        };
        if link
            .send(&(number, outcome), found.as_ref().map(AsFd::as_fd), true)
            .is_err()
        {
            break;
        }
    }
    Ok(())
}

fn launch(
    binary: Option<PathBuf>,
    arguments: &[OsString],
    input: OwnedFd,
) -> Result<Child, String> {
    let binary = match binary {
        Some(path) => check_binary(&path).map(|()| path)?,
        None => own_binary()
            .map_err(|error| format!("cannot find this program's file: {}", cause(error)))?,
    };
    let is_new = |argument: &&OsString| *argument != TAKE_OVER;
    let mut arguments = arguments.iter().filter(is_new);
    let mut command = Command::new(&binary);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let mut arguments: Vec<_> = arguments.collect();
    let take_over = OsString::from(TAKE_OVER);
    // Behind the name of the command: what follows may be anything.
    arguments.insert(arguments.len().min(1), &take_over);
    // What a service manager has passed comes from the predecessor: by this it is known that there
    // was something.
    command.args(arguments).env("LISTEN_FDS", "0");
    let started = command.stdin(input).spawn();
    started.map_err(|error| {
        format!(
            "{}: cannot start the program: {}",
            binary.display(),
            cause(error)
        )
    })
}
