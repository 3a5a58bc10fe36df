//! Starts successors and other programs: this process does so itself, or a helper process, the
//! *starter*, if the sandbox lets this process start no program. The starter is started before the
//! sandbox is entered, so the programs do not inherit the sandbox.

use super::program::{check_binary, own_binary};
use fathom_exports::fuse::{Launch, Mounting, launch as launch_mount};
use fathom_host::Error;
use fathom_host::link::Link;
use fathom_sandbox::Mode;
use fathom_storage::cached::Terms;
use fathom_storage::cached::finder::{Find, find_or_start};
use fathom_units::cause;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The argument of `fathom serve` that says that standard input is a socket to a predecessor.
pub const TAKE_OVER: &str = "--take-over";

/// Timeout for a reply of the starter, longer than the timeout for the start of a keeper.
const PATIENCE: Duration = Duration::from_secs(15);

/// Starts successors, with the arguments that this process was started with.
pub struct Starter {
    arguments: Vec<OsString>,
    /// The starter process. None: this process starts programs itself.
    apart: Option<Arc<Apart>>,
}

/// The link to the starter, and the number of the last order. Locked from an order until its
/// outcome has arrived.
pub type Apart = Mutex<(Link, u64)>;

/// Orders to the starter process. [`Order::Start`] comes with the successor's standard input,
/// [`Order::Mount`] with the socket of the program that mounts.
#[derive(Serialize, Deserialize)]
enum Order {
    Start(Option<PathBuf>),
    Kill,
    /// Finds the keeper of this base image, or starts one. The outcome comes with a connection to
    /// the keeper.
    Base(Terms),
    /// Mounts a disk over a file.
    Mount(Mounting),
}

/// Process id of a successor that was started or killed, or 0. The error is one line for the user.
type Outcome = Result<u32, String>;

/// A successor's process, by the process that has started it.
pub enum Started<'a> {
    Here(Child),
    Apart(&'a Apart, u32),
    /// Started by another process, which the function asks to kill the successor.
    Elsewhere(Box<dyn FnMut() -> Result<(), String> + 'a>),
}

impl Starter {
    /// Must be called before the sandbox is entered.
    pub fn new(arguments: Vec<OsString>, sandbox: Mode) -> Result<Starter, Error> {
        let apart = (sandbox != Mode::Off).then(|| apart(&arguments, sandbox));
        let apart = apart.transpose();
        let apart = apart.map_err(Error::io("cannot start the process that starts successors"))?;
        let apart = apart.map(|link| Arc::new(Mutex::new((link, 0))));
        Ok(Starter { arguments, apart })
    }

    /// Returns a function that finds the keepers of base images, or starts them with this sandbox.
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

    /// Returns a function that starts the program that mounts files.
    pub fn launcher(&self) -> Launch {
        let apart = self.apart.clone();
        Box::new(move |mounting, socket| match &apart {
            None => launch_mount(mounting, socket).map(reap_later),
            Some(apart) => {
                let done = order(apart, &Order::Mount(mounting.clone()), Some(socket));
                done.map(drop).map_err(io::Error::other)
            }
        })
    }

    /// Starts a successor with this standard input. The error is one line for the user.
    pub fn start(&self, binary: Option<PathBuf>, input: OwnedFd) -> Result<Started<'_>, String> {
        let Some(link) = &self.apart else {
            return launch(binary, &self.arguments, input).map(Started::Here);
        };
        let (pid, _) = order(link, &Order::Start(binary), Some(input))?;
        Ok(Started::Apart(link, pid))
    }
}

impl Started<'_> {
    /// Process id. 0: only the process that has started the successor knows its process id.
    pub fn pid(&self) -> u32 {
        match self {
            Started::Here(child) => child.id(),
            Started::Apart(_, pid) => *pid,
            Started::Elsewhere(_) => 0,
        }
    }

    /// Kills the successor. When this function returns, the successor has ended.
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
            // The successor may have opened the disks already, and two processes that write to a
            // disk would destroy its data.
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
        // Tools that look for servers by the name of the program must not find this process.
        .arg0("fathom-starter")
        .args(["starter", sandbox.name(), "--"])
        .args(arguments)
        .stdin(theirs)
        // Signals from a terminal, such as SIGINT, go to the server alone.
        .process_group(0)
        .spawn()?;
    Ok(link)
}

/// Waits for the end of a child process on a thread, so that no zombie remains.
fn reap_later(mut child: Child) {
    std::thread::spawn(move || child.wait());
}

fn order(
    apart: &Apart,
    order: &Order,
    with: Option<OwnedFd>,
) -> Result<(u32, Option<OwnedFd>), String> {
    let mut apart = apart.lock();
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
            // A reply to an order that has timed out.
            Some(_) | None => {}
        }
    }
}

/// Runs the starter process: carries out orders from standard input until the server has ended.
/// `sandbox`: the sandbox of keepers of base images, which replaces the one that an order names.
pub fn start_successors(sandbox: Mode, arguments: &[OsString]) -> Result<(), Error> {
    // The program was started as /proc/self/exe, which would give the process the name "exe". (Only
    // people read the name.)
    let _ = rustix::thread::set_name(c"fathom-starter");
    // Sockets that a service manager has passed belong to the server.
    // SAFETY: nothing in this process has opened a file yet except the standard streams.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    let link = io::stdin().as_fd().try_clone_to_owned();
    let link = Link::from(link.map_err(Error::io("the server has ended"))?);
    let mut child: Option<Child> = None;
    let mut helpers: Vec<Child> = Vec::new();
    // An error means that the server has ended.
    while let Ok(Some(((number, order), input))) = link.receive::<(u64, Order)>(true) {
        helpers.retain_mut(|helper| !matches!(helper.try_wait(), Ok(Some(_))));
        let mut found = None;
        let outcome: Outcome = match (order, input) {
            (Order::Base(terms), _) => {
                let sandbox = sandbox.to_string();
                let terms = Terms { sandbox, ..terms };
                match find_or_start(&terms, &mut |keeper| helpers.push(keeper)) {
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
            (Order::Mount(mounting), Some(socket)) => match launch_mount(&mounting, socket) {
                Ok(helper) => {
                    helpers.push(helper);
                    Ok(0)
                }
                Err(error) => Err(cause(error)),
            },
            (Order::Mount(_), None) => Err("the program that mounts has no socket".into()),
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
    // Arguments after the name of the command may be anything, so this one comes right behind that
    // name.
    arguments.insert(arguments.len().min(1), &take_over);
    // The predecessor hands over the sockets that a service manager has passed. The variable tells
    // the successor that there were such sockets.
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
