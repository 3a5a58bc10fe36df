//! Hands over to a successor.

use super::starter::Starter;
use super::successor::Successor;
use super::wire::{Peer, WireError};
use crate::controller::Controller;
use fathom_api::Api;
use fathom_control::{ErrorKind, RequestError};
use fathom_exports::vhost_user::{Frozen, Halting};
use fathom_host::handover::describe;
use fathom_host::handover::{Counted, Go, Hello, Progress, Renewal, State, Stopped, Word};
use fathom_host::handover::{Given, GivenDisk, HandoverHost};
use fathom_sockets::Descriptors;
use fathom_units::cause;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Timeouts of the successor: for its first message; for opening all disks and mapping all memory;
/// and for taking the disks into use while guests wait.
const START: Duration = Duration::from_secs(10);
const PREPARE: Duration = Duration::from_secs(20);
const ACTIVATE: Duration = Duration::from_secs(10);
/// Timeout for requests in flight.
const HALT: Duration = Duration::from_secs(5);
/// Timeout for the successor's last message, after it has taken over.
const SERVE: Duration = Duration::from_secs(5);
/// Timeout of a new supervisor for each of its tenants.
const TENANT: Duration = Duration::from_secs(90);
/// Time for the remaining work of disks that a successor serves.
const END: Duration = Duration::from_secs(2);

/// A completed handover. This process must end without touching the disks.
pub struct HandedOver {
    pub pid: u32,
    /// Time for which queues were stopped.
    pub pause: Duration,
    /// The successor, which reports the results of the tenants, if the server has any.
    tenants: Option<Peer>,
}

impl HandedOver {
    /// Waits for the results of all tenants. None: the server has no tenants.
    pub fn tenants(&mut self) -> Option<Vec<Renewal>> {
        let peer = self.tenants.as_mut()?;
        let mut all = Vec::new();
        loop {
            match peer.receive(Some(TENANT)) {
                Ok((Progress::Tenant(renewal), _)) => all.push(renewal),
                Ok((Progress::Done, _)) => return Some(all),
                Err(error) => {
                    tracing::error!(
                        "upgrade: the outcome for the remaining tenants is unknown: {error}"
                    );
                    return Some(all);
                }
            }
        }
    }
}

/// Hands the server over to another process. After an error, the server continues; the error is one
/// line for the user.
pub fn hand_over(
    controller: &mut Controller,
    api: Option<&Api>,
    starter: &Starter,
    binary: Option<PathBuf>,
) -> Result<HandedOver, RequestError> {
    let checked = controller.handover_host()?.may_be_handed_over();
    checked.map_err(|text| ErrorKind::Conflict.because(text))?;
    let successor = Successor::start(starter, binary);
    let outcome = successor.and_then(greet).and_then(|greeted| {
        api.inspect(|api| api.hold(true));
        let given = controller.give()?;
        let handover_host = controller.handover_host().map_err(|error| error.text)?;
        give(greeted, given, handover_host, api)
    });
    outcome.or_else(|problem| {
        // (The successor has ended, and front-ends are served again.)
        controller.handover_host()?.take_back();
        api.inspect(|api| api.hold(false));
        Err(ErrorKind::Failed.because(problem))
    })
}

/// Hands these disks over to another process. After an error, `kill` has ended that process, and
/// the disks continue here; the error is one line for the user.
pub fn hand_over_disks(
    handover_host: &mut dyn HandoverHost,
    socket: OwnedFd,
    kill: Box<dyn FnMut() -> Result<(), String> + '_>,
) -> Result<HandedOver, String> {
    let successor = Successor::elsewhere(socket, kill).map_err(cause)?;
    handover_host.may_be_handed_over()?;
    let outcome = greet(successor).and_then(|greeted| {
        let given = handover_host.give()?;
        give(greeted, given, handover_host, None)
    });
    outcome.inspect_err(|_| handover_host.take_back())
}

/// A successor, and the versions that it understands.
type Greeted<'a> = (Successor<'a>, Hello);

fn greet(mut successor: Successor<'_>) -> Result<Greeted<'_>, String> {
    let started = successor.peer.receive(Some(START));
    let (hello, _): (Hello, _) = started.map_err(told("did not start"))?;
    Ok((successor, hello))
}

fn give(
    (mut successor, hello): Greeted<'_>,
    given: Given,
    handover_host: &dyn HandoverHost,
    api: Option<&Api>,
) -> Result<HandedOver, String> {
    hello.check(given.state.version)?;
    let Given {
        mut state,
        mut files,
        disks,
    } = given;
    if let Some(api) = api {
        let listener = api.hand_over(&mut files);
        state.api = Some(
            listener
                .map_err(|error| format!("cannot hand over the API's socket: {}", cause(error)))?,
        );
        state.files = files.len();
    }
    let mut exports = Vec::new();
    for GivenDisk {
        state: mut disk,
        mut export,
        lent,
    } in disks
    {
        let mut own = Descriptors::default();
        if let Some(export) = &mut export {
            own = std::mem::take(&mut export.descriptors);
            disk.export = export.state.take();
        }
        let lent = describe(&lent, &mut own);
        disk.lent =
            lent.map_err(|error| format!("cannot duplicate a file descriptor: {}", cause(error)))?;
        disk.files = own.len();
        files.append(own);
        state.disks.push(disk);
        exports.push(export);
    }
    let pause = match commit(&mut successor, &exports, &state, files, handover_host) {
        Ok(pause) => pause,
        Err(problem) => {
            // (The disks may be used again only after the successor's end.)
            drop(successor);
            let going_on: Vec<_> = exports.into_iter().flatten().map(Frozen::go_on).collect();
            going_on.into_iter().for_each(|export| export.wait(HALT));
            return Err(problem);
        }
    };
    successor.let_live();
    exports.into_iter().flatten().for_each(Frozen::leave);
    // (If the successor has ended, the counters are lost.)
    let _ = successor.peer.send(&Counted(handover_host.counts()));
    let _ = successor.peer.receive::<Word>(Some(SERVE));
    handover_host.end(Instant::now() + END);
    let tenants = state.tenants.and_then(|_| successor.peer.try_clone().ok());
    Ok(HandedOver {
        pid: successor.pid(),
        pause,
        tenants,
    })
}

/// Time for which guests have waited.
fn commit(
    successor: &mut Successor<'_>,
    exports: &[Option<Frozen>],
    state: &State,
    files: Descriptors,
    handover_host: &dyn HandoverHost,
) -> Result<Duration, String> {
    let peer = &mut successor.peer;
    peer.send_with(state, &files)
        .map_err(told("did not receive the server's state"))?;
    drop(files);
    match peer
        .receive(Some(PREPARE))
        .map_err(told("did not prepare"))?
    {
        (Word::Prepared, _) => {}
        other => return Err(refused(other.0)),
    }
    handover_host.flush_early();
    let begun = Instant::now();
    // (Before front-ends stop: clients depend on them.)
    let (clients, mut files) = handover_host.hold_clients(begun + HALT)?;
    let halting: Vec<_> = exports
        .iter()
        .map(|export| export.as_ref().map(Frozen::begin_halt))
        .collect();
    let wait = |halting: Option<Halting>| halting.map(|halting| halting.wait(begun + HALT));
    let bases = halting.into_iter().map(wait);
    let bases = bases.map(|bases| Ok::<_, String>(bases.transpose()?.unwrap_or_default()));
    let bases = bases.collect::<Result<_, _>>()?;
    let left = handover_host.final_states()?;
    let left = left.iter().map(|left| describe(left, &mut files));
    let left = left.collect::<Result<_, _>>();
    let stopped = Stopped {
        bases,
        clients,
        left: left
            .map_err(|error| format!("cannot duplicate a file descriptor: {}", cause(error)))?,
    };
    peer.send_with(&stopped, &files)
        .map_err(told("did not receive the state of the queues"))?;
    match peer
        .receive(Some(ACTIVATE))
        .map_err(told("cannot use the disks"))?
    {
        (Word::Active, _) => {}
        other => return Err(refused(other.0)),
    }
    // (The message may fail: the successor continues by itself after the end of this process.)
    peer.send(&Go)
        .map_err(told("ended before it served the disks"))?;
    Ok(begun.elapsed())
}

fn told(what: &'static str) -> impl Fn(WireError) -> String {
    move |error| {
        format!(
            "the new process {what}: {error} (the log has its own messages); this server \
             continues"
        )
    }
}

fn refused(word: Word) -> String {
    match word {
        Word::Refused(problem) => {
            format!("the new process cannot take over: {problem}; this server continues")
        }
        _ => "the new process sent an unexpected message; this server continues".into(),
    }
}
