//! Handing over.

use super::estate::{Estate, Given, GivenDisk};
use super::left::describe;
use super::starter::Starter;
use super::state::{Counted, Go, Hello, Progress, Renewal, State, Stopped, Word};
use super::successor::Successor;
use super::wire::{Peer, WireError};
use crate::api::Api;
use crate::controller::Controller;
use fathom_control::{ErrorKind, RequestError};
use fathom_exports::Descriptors;
use fathom_exports::vhost_user::{Frozen, Halting};
use fathom_units::cause;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long the successor may take for its first word; to open all disks and map all memory; and
/// to take the disks into use, while guests wait.
const START: Duration = Duration::from_secs(10);
const PREPARE: Duration = Duration::from_secs(20);
const ACTIVATE: Duration = Duration::from_secs(10);
/// What is in flight has so long to end.
const HALT: Duration = Duration::from_secs(5);
/// The successor has all, and is only waited for to be found.
const SERVE: Duration = Duration::from_secs(5);
/// A new supervisor has so long for one of its tenants.
const TENANT: Duration = Duration::from_secs(90);
/// How long a tenant's process may take to go to another one, whatever happens.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// What disks have still to do when they are another process's.
const END: Duration = Duration::from_secs(2);

/// It is the successor's now: this process is to end, and touch nothing any more.
pub struct HandedOver {
    pub pid: u32,
    /// From when the queues were stopped until the successor had them.
    pub pause: Duration,
    /// Of a server with tenants.
    tenants: Option<Peer>,
}

impl HandedOver {
    /// What becomes of each tenant; None: there are none. Waits for it.
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

/// Have another process go on. On an error all is as before; it is one line for the user.
pub fn hand_over(
    controller: &mut Controller,
    api: Option<&Api>,
    starter: &Starter,
    binary: Option<PathBuf>,
) -> Result<HandedOver, RequestError> {
    let checked = controller.estate()?.may_be_handed_over();
    checked.map_err(|text| ErrorKind::Conflict.because(text))?;
    let successor = Successor::start(starter, binary);
    let outcome = successor.and_then(greet).and_then(|greeted| {
        api.inspect(|api| api.hold(true));
        let given = controller.give()?;
        let estate = controller.estate().map_err(|error| error.text)?;
        give(greeted, given, estate, api)
    });
    outcome.or_else(|problem| {
        // The successor is dead, and front-ends are served again.
        controller.estate()?.take_back();
        api.inspect(|api| api.hold(false));
        Err(ErrorKind::Failed.because(problem))
    })
}

/// Have another process go on with these disks, which `kill` ends: on an error it has, and all is as
/// before; it is one line for the user.
pub fn hand_over_disks(
    estate: &mut dyn Estate,
    socket: OwnedFd,
    kill: Box<dyn FnMut() -> Result<(), String> + '_>,
) -> Result<HandedOver, String> {
    let successor = Successor::elsewhere(socket, kill).map_err(cause)?;
    estate.may_be_handed_over()?;
    let outcome = greet(successor).and_then(|greeted| {
        let given = estate.give()?;
        give(greeted, given, estate, None)
    });
    outcome.inspect_err(|_| estate.take_back())
}

/// A successor, and what it understands.
type Greeted<'a> = (Successor<'a>, Hello);

fn greet(mut successor: Successor<'_>) -> Result<Greeted<'_>, String> {
    let started = successor.peer.receive(Some(START));
    let (hello, _): (Hello, _) = started.map_err(told("did not start"))?;
    Ok((successor, hello))
}

fn give(
    (mut successor, hello): Greeted<'_>,
    given: Given,
    estate: &dyn Estate,
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
    let pause = match commit(&mut successor, &exports, &state, files, estate) {
        Ok(pause) => pause,
        Err(problem) => {
            // Only when it is dead may the disks be used again.
            drop(successor);
            let going_on: Vec<_> = exports.into_iter().flatten().map(Frozen::go_on).collect();
            going_on.into_iter().for_each(|export| export.wait(HALT));
            return Err(problem);
        }
    };
    successor.let_live();
    exports.into_iter().flatten().for_each(Frozen::leave);
    // It may be gone, and so are the counts then.
    let _ = successor.peer.send(&Counted(estate.counts()));
    let _ = successor.peer.receive::<Word>(Some(SERVE));
    estate.end(Instant::now() + END);
    let tenants = state.tenants.and_then(|_| successor.peer.try_clone().ok());
    Ok(HandedOver {
        pid: successor.pid(),
        pause,
        tenants,
    })
}

/// How long guests have waited.
fn commit(
    successor: &mut Successor<'_>,
    exports: &[Option<Frozen>],
    state: &State,
    files: Descriptors,
    estate: &dyn Estate,
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
    estate.flush_early();
    let begun = Instant::now();
    // Before the disks' virtual machines let go of them, on which clients depend.
    let (clients, mut files) = estate.hold_clients(begun + HALT)?;
    let halting: Vec<_> = exports
        .iter()
        .map(|export| export.as_ref().map(Frozen::begin_halt))
        .collect();
    let wait = |halting: Option<Halting>| halting.map(|halting| halting.wait(begun + HALT));
    let bases = halting.into_iter().map(wait);
    let bases = bases.map(|bases| Ok::<_, String>(bases.transpose()?.unwrap_or_default()));
    let bases = bases.collect::<Result<_, _>>()?;
    let left = estate.leave()?;
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
    // Sent or not: the successor goes on by itself when this process is gone, and it can only be
    // missing if the successor is.
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
