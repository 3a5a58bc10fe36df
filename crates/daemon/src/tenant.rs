//! The process of a tenant, which serves the tenant's disks by commands of its supervisor. Files
//! that the process cannot open itself are opened by the supervisor.

use crate::cage;
use crate::handover::{self, HandedOver};
use crate::limits;
use fathom_api::ApiOptions;
use fathom_control::ErrorKind;
use fathom_core::{ThreadKind, thread_starts};
use fathom_disks::Objects;
use fathom_files::gate::{self, Gate, Got, Refused, Wanted};
use fathom_host::link::{AtGate, FromGate, FromTenant, Link, ToTenant};
use fathom_host::options::ServeOptions;
use fathom_host::signals::LeftToThisThread;
use fathom_host::users::User;
use fathom_host::{Error, Host, StopTimeout, Tenancy};
use fathom_metrics::{Events, Happened};
use fathom_requests::{Answer, Ask, Reply};
use fathom_spec::PoolSpec;
use fathom_units::cause;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::exit;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;

/// The number of a command, and the reply to that command.
type Answered = (u64, Answer);

/// A tenant that has entered its sandbox, and serves no disk yet.
pub struct NewTenant {
    link: Link,
    gate: Link,
    options: ServeOptions,
    /// Socket to the process of this tenant that hands over its disks.
    predecessor: Option<OwnedFd>,
}

/// Makes this process a tenant, and must be called before it starts threads. Standard input is the
/// link to the supervisor, standard output the gate.
pub fn begin_tenant(events: Events) -> Result<NewTenant, Error> {
    // The program was started as /proc/self/exe, which would give the process the name "exe". (Only
    // people read the name.)
    let _ = rustix::thread::set_name(c"fathom-tenant");
    limits::raise();
    let (link, gate) = sockets().map_err(Error::io("cannot connect to the supervisor"))?;
    let Begun {
        options,
        user,
        connects,
        predecessor,
    } = begin(&link, events)?;
    if connects.is_some()
        && let Err(problem) = fathom_storage::rbd::prepare()
    {
        // Errors of these disks name the problem, too.
        tracing::warn!("{problem}");
    }
    cage::lock_up(options.sandbox, user, connects.as_deref())
        .map_err(Error::io("cannot enter the sandbox"))?;
    Ok(NewTenant {
        link,
        gate,
        options,
        predecessor,
    })
}

/// Carries out the supervisor's commands. Returns after the supervisor's last command, or after a
/// handover. If the supervisor ends, the process exits at once, as if it were killed.
pub fn serve_tenant(tenant: NewTenant) -> Result<(), Error> {
    // Only the supervisor handles signals.
    let _signals = LeftToThisThread::begin();
    let NewTenant {
        link,
        gate,
        options,
        predecessor,
    } = tenant;
    let gate = Arc::new(AtSupervisor {
        socket: gate,
        answers: Mutex::default(),
    });
    gate::install(gate.clone());
    tell_events(&options.events, gate).map_err(Error::io("cannot start a thread"))?;
    let has_predecessor = predecessor.is_some();
    let (answers, answered) = channel();
    let mut tenant = Tenant {
        link,
        objects: objects(options, predecessor)?,
        answers,
        answered,
        has_handed_over: false,
    };
    if has_predecessor {
        tenant.tell(&FromTenant::Serving);
    }
    while tenant.turn()? {}
    if tenant.has_handed_over {
        // All files are the successor's now, so no destructor may run.
        std::mem::forget(tenant);
        return Ok(());
    }
    let stopped = tenant.objects.stop();
    for (name, outcome) in tenant.objects.outcomes() {
        tenant.tell(&FromTenant::Outcome(name, Box::new(outcome.summary)));
    }
    tenant.tell(&FromTenant::Ended(Vec::new()));
    if let Err(error @ Error::Abandoned { .. }) = &stopped {
        tracing::error!("{error}");
        exit(1);
    }
    stopped
}

/// Returns a host without disks, or one with the predecessor's disks.
fn objects(options: ServeOptions, predecessor: Option<OwnedFd>) -> Result<Box<dyn Host>, Error> {
    let Some(socket) = predecessor else {
        let objects = Objects::open(options, Vec::new(), Vec::new())?;
        return Ok(Box::new(objects));
    };
    let mut heir = handover::receive(options, socket)?;
    heir.settle();
    Ok(heir.controller.into_host())
}

fn sockets() -> io::Result<(Link, Link)> {
    let link = io::stdin().as_fd().try_clone_to_owned()?;
    let gate = io::stdout().as_fd().try_clone_to_owned()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok((link.into(), gate.into()))
}

/// The contents of the supervisor's first message.
struct Begun {
    options: ServeOptions,
    /// The user that the process becomes.
    user: Option<User>,
    /// Directories with settings of a library that makes network connections for some disks. None:
    /// no disk needs that.
    connects: Option<Vec<PathBuf>>,
    /// Socket to the predecessor.
    predecessor: Option<OwnedFd>,
}

fn begin(link: &Link, events: Events) -> Result<Begun, Error> {
    let first = link
        .receive(true)
        .map_err(Error::io("no message from the supervisor"))?;
    let Some((
        ToTenant::Begin {
            pools,
            stop_timeout_ms,
            sandbox,
            user,
            connects,
        },
        predecessor,
    )) = first
    else {
        return Err(Error::Options(
            "the supervisor sent an unexpected first message".into(),
        ));
    };
    let sandbox = sandbox.parse().map_err(Error::Options)?;
    let pools = pools.into_iter();
    let pools = pools.map(|(name, table): (String, PoolSpec)| table.into_options(&name));
    let options = ServeOptions {
        disks: Vec::new(),
        pools: pools.collect::<Result<_, _>>().map_err(Error::Options)?,
        nbd: None,
        api: ApiOptions::default(),
        config: None,
        kept: None,
        tenants: false,
        tenancy: Tenancy::default(),
        sandbox,
        events,
        stop_timeout: StopTimeout(Duration::from_millis(stop_timeout_ms)),
        arguments: Vec::new(),
    };
    Ok(Begun {
        options,
        user,
        connects,
        predecessor,
    })
}

struct Tenant {
    link: Link,
    objects: Box<dyn Host>,
    answers: Sender<Answered>,
    answered: Receiver<Answered>,
    /// A successor serves the disks.
    has_handed_over: bool,
}

impl Tenant {
    /// Waits for an event and handles it. False: the process must end.
    fn turn(&mut self) -> Result<bool, Error> {
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: Vec<_> = self.objects.events().into_iter().map(input).collect();
        fds.push(input(self.link.as_fd()));
        let timeout = self.objects.patience();
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        // (The next call of `poll` reports the error again.)
        let _ = poll(&mut fds, timeout.as_ref());
        if !self.objects.turn() {
            return Err(Error::Options(
                "a thread that serves front-ends has ended".into(),
            ));
        }
        let goes_on = self.listen();
        let answered: Vec<_> = self.answered.try_iter().collect();
        for (number, answer) in answered {
            self.answer(number, answer);
        }
        Ok(goes_on)
    }

    /// Carries out the supervisor's commands. False: the process must end.
    fn listen(&mut self) -> bool {
        loop {
            match self.link.receive(false) {
                Ok(None) => return true,
                Ok(Some((ToTenant::Ask { number, ask }, _))) => self.ask(number, ask),
                Ok(Some((ToTenant::HandOver, Some(socket)))) => {
                    self.hand_over(socket);
                    if self.has_handed_over {
                        return false;
                    }
                }
                Ok(Some((ToTenant::Begin { .. } | ToTenant::HandOver | ToTenant::GoOn, _))) => {}
                Ok(Some((ToTenant::End, _))) => return false,
                Err(error) => gone(&error),
            }
        }
    }

    fn ask(&mut self, number: u64, ask: Ask) {
        let answers = self.answers.clone();
        let responder = move |answer| drop(answers.send((number, answer)));
        self.objects.ask(ask, Box::new(responder));
    }

    /// Hands over to the process at the other end of the socket. After an error, this process
    /// continues.
    fn hand_over(&mut self, socket: OwnedFd) {
        let link = &self.link;
        let kill = Box::new(|| end_successor(link));
        let handover_host = self.objects.handover_host().map_err(|error| error.text);
        let outcome = handover_host
            .and_then(|handover_host| handover::hand_over_disks(handover_host, socket, kill));
        match outcome {
            Ok(HandedOver { pause, .. }) => {
                self.has_handed_over = true;
                let pause_ms = pause.as_secs_f64() * 1e3;
                self.tell(&FromTenant::HandedOver { pause_ms });
            }
            Err(problem) => self.tell(&FromTenant::Stays(problem)),
        }
    }

    /// Sends the reply to a command. In place of one that is too long, the supervisor gets an
    /// error.
    fn answer(&self, number: u64, answer: Answer) {
        let message = FromTenant::Answer { number, answer };
        match self.link.send(&message, None, true) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                let text = format!("the reply is too long: {}", cause(error));
                let answer = Err(ErrorKind::Failed.because(text));
                self.tell(&FromTenant::Answer { number, answer });
            }
            Err(error) => gone(&error),
            Ok(()) => {}
        }
    }

    fn tell(&self, message: &FromTenant<Reply>) {
        if let Err(error) = self.link.send(message, None, true) {
            gone(&error);
        }
    }
}

/// Time within which the supervisor must kill a process.
const KILL: Duration = Duration::from_secs(10);

/// Makes the supervisor kill the process that could not take over.
fn end_successor(link: &Link) -> Result<(), String> {
    let failed = |error: io::Error| format!("the supervisor: {}", cause(error));
    let message: FromTenant<Reply> = FromTenant::EndSuccessor;
    let asked = link.send(&message, None, true);
    asked.map_err(failed)?;
    if !link.has_message(KILL) {
        return Err(failed(io::ErrorKind::TimedOut.into()));
    }
    match link.receive(false).map_err(failed)? {
        Some((ToTenant::GoOn, _)) => Ok(()),
        _ => Err("the supervisor sent an unexpected message".into()),
    }
}

/// Exits, because the supervisor has ended, and the next supervisor needs the disks that this
/// process has open.
fn gone(error: &io::Error) -> ! {
    tracing::debug!(
        "the connection to the supervisor is closed: {}",
        cause(error)
    );
    exit(1)
}

struct AtSupervisor {
    socket: Link,
    /// Held from a request until its reply has arrived.
    answers: Mutex<()>,
}

impl Gate for AtSupervisor {
    fn get(&self, wanted: &Wanted, with: Option<BorrowedFd<'_>>) -> Result<Got, Refused> {
        let _mine = self.answers.lock();
        self.socket
            .send(&AtGate::Want(wanted.clone()), with, true)?;
        let answer = self.socket.receive::<FromGate>(true)?;
        let (answer, file) =
            answer.ok_or_else(|| io::Error::other("no message from the supervisor"))?;
        let path = answer?;
        let file =
            file.ok_or_else(|| io::Error::other("the supervisor sent no file descriptor"))?;
        Ok(Got { file, path })
    }
}

/// Starts a thread that reports events to the supervisor.
fn tell_events(events: &Events, gate: Arc<AtSupervisor>) -> io::Result<()> {
    let mut listener = events.listen();
    let builder = std::thread::Builder::new().name("events".into());
    builder.spawn(move || {
        thread_starts(ThreadKind::Session);
        loop {
            let happened = match listener.blocking_recv() {
                Ok(line) => serde_json::from_str::<Happened>(&line).ok(),
                Err(RecvError::Lagged(count)) => Some(Happened::Lost { count }),
                Err(RecvError::Closed) => return,
            };
            let message = happened.map(AtGate::Happened);
            let sent = message.map(|message| gate.socket.send(&message, None, true));
            let is_gone = |error: &io::Error| error.kind() != io::ErrorKind::FileTooLarge;
            if matches!(&sent, Some(Err(error)) if is_gone(error)) {
                return;
            }
        }
    })?;
    Ok(())
}
