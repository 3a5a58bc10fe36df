//! Takes over from a predecessor.

use super::wire::{Peer, WireError};
use crate::controller::Controller;
use fathom_api::{AdoptedSockets, ApiSockets};
use fathom_control::Definitions;
use fathom_disks::Objects;
use fathom_exports::vhost_user::{Arrival, Arriving, arrival};
use fathom_host::handover::taken;
use fathom_host::handover::{Counted, DiskState, Go, Hello, State, Stopped, Word};
use fathom_host::options::{DiskOptions, ServeOptions};
use fathom_host::{Error, Host};
use fathom_metrics::Scale;
use fathom_sockets::{Bound, Descriptors, Listener};
use fathom_spec::SocketSpec;
use fathom_supervisor::Tenants;
use fathom_trace::Clock;
use fathom_units::cause;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Timeout for the predecessor's counters.
const COUNT: Duration = Duration::from_secs(2);

/// The state that this process has taken over from a predecessor.
pub struct Received {
    pub controller: Controller,
    /// The API's listeners, and the scale of metrics.
    pub sockets: Option<(ApiSockets, Scale)>,
    peer: Peer,
}

impl Received {
    /// Tells the predecessor that everything is served, and continues its counters.
    pub fn settle(&mut self) {
        match self.peer.receive(Some(COUNT)) {
            Ok((Counted(counts), _)) => {
                if let Ok(handover_host) = self.controller.handover_host() {
                    handover_host.continue_counts(&counts);
                }
            }
            Err(error) => tracing::warn!(
                "upgrade: cannot read the predecessor's counters, so they restart at 0: {error}"
            ),
        }
        // (The predecessor may have ended.)
        let _ = self.peer.send(&Word::Serving);
    }

    /// Replaces tenants' processes by processes of this program, and tells the predecessor the
    /// results.
    pub fn renew_tenants(mut self) -> Controller {
        let mut peer = self.peer;
        if let Ok(handover_host) = self.controller.handover_host() {
            // (The predecessor may have ended.)
            handover_host.renew(Box::new(move |progress| drop(peer.send(&progress))));
        }
        self.controller
    }
}

/// Takes over from the process at the other end of the socket. After an error, that process
/// continues, and this process must end.
pub fn receive(options: ServeOptions, socket: OwnedFd) -> Result<Received, Error> {
    let peer = Peer::new(UnixStream::from(socket));
    let mut peer = peer.map_err(Error::io("cannot talk to the predecessor"))?;
    peer.send(&Hello::OURS).map_err(gone)?;
    let (state, files): (State, _) = peer.receive(None).map_err(gone)?;
    let prepared = prepare(options, state, files);
    let prepared = prepared.and_then(|prepared| Ok((prepared.wait()?, prepared)));
    let ((), mut prepared) = prepared.map_err(|problem| refuse(&mut peer, problem))?;
    peer.send(&Word::Prepared).map_err(gone)?;
    let (stopped, files) = peer.receive(None).map_err(gone)?;
    // From here on, the disks belong to this process until it ends.
    let active = prepared.activate(stopped, files);
    active.map_err(|problem| refuse(&mut peer, problem))?;
    // (The predecessor continues only after it has killed this process. Therefore its end says as
    // much as its reply.)
    match peer.send(&Word::Active).and_then(|()| peer.receive(None)) {
        Ok((Go, _)) => {}
        Err(error) => tracing::warn!(
            "upgrade: the predecessor ended without a last message; this server continues: \
             {error}"
        ),
    }
    Ok(prepared.run(peer))
}

fn gone(error: WireError) -> Error {
    Error::Options(format!("cannot take over from the predecessor: {error}"))
}

fn refuse(peer: &mut Peer, problem: String) -> Error {
    let _ = peer.send(&Word::Refused(problem.clone()));
    Error::Options(format!("cannot take over: {problem}"))
}

/// A successor that has opened everything and changed nothing.
struct Prepared {
    controller: Controller,
    exports: Vec<Option<Arriving>>,
    nbd: Vec<Bound>,
    api: Option<(AdoptedSockets, Option<SocketSpec>, Scale)>,
    /// The predecessor.
    pid: u32,
}

fn prepare(
    mut options: ServeOptions,
    state: State,
    mut files: Descriptors,
) -> Result<Prepared, String> {
    if Hello::OURS.check(state.version).is_err() {
        return Err(format!(
            "the handover has version {}, which this program does not know",
            state.version
        ));
    }
    if options.tenants != state.tenants.is_some() {
        return Err(
            "the configuration has added or removed tenants, which needs a restart instead of an \
             upgrade"
                .into(),
        );
    }
    let mut own = files.split_off_front(state.files);
    let mut clients = Vec::new();
    let mut bounds = Vec::new();
    for socket in state.nbd {
        let (listener, bound) = Listener::adopt(socket, &mut own)?;
        clients.push(listener);
        bounds.push(bound);
    }
    if options.nbd.is_some() == clients.is_empty() {
        return Err(
            "the configuration has added or removed [nbd], which needs a restart instead of an \
             upgrade"
                .into(),
        );
    }
    let kept = state
        .kept
        .map(|(path, number)| Ok::<_, String>((path, own.take(number)?)));
    let kept = kept.transpose()?;
    if kept.as_ref().map(|(path, _)| path) != options.kept.as_ref() {
        return Err(
            "the configuration names another disks-dir, which needs a restart instead of an \
             upgrade"
                .into(),
        );
    }
    // (An older predecessor sends no definitions. The configuration that it read is unknown, so
    // this process uses the present one.)
    let listed = options.disks.iter();
    let listed = listed.map(|disk| (*disk.spec).clone());
    let definitions = state.definitions.unwrap_or_else(|| Definitions {
        declared: listed.map(|spec| (spec.name.clone(), spec)).collect(),
        ..Definitions::default()
    });
    let hz = state.api.as_ref().and_then(|api| api.ticks_per_second);
    let api = state
        .api
        .map(|api| AdoptedSockets::new(api.sockets, &options.api, &mut own));
    let api = api.transpose()?;
    let scale = Scale::new(hz.unwrap_or_else(|| Clock::get().hz()));
    let api = api.map(|adopted| (adopted, options.api.socket.clone(), scale));
    let uptime = Duration::from_millis(state.uptime_ms);
    let (host, exports): (Box<dyn Host>, _) = match state.tenants {
        Some(tenants) => (
            Box::new(Tenants::adopt(&options, tenants, state.groups, &mut own)?),
            Vec::new(),
        ),
        None => {
            let disks = (state.disks, files);
            let (objects, exports) = take_disks(&mut options, disks, clients, uptime)?;
            (Box::new(objects), exports)
        }
    };
    let controller = Controller::new(host, &options);
    let mut controller =
        controller.map_err(|error| format!("cannot create a command queue: {}", cause(error)))?;
    let taken = controller.take(state.origins, definitions, kept);
    taken.map_err(cause)?;
    Ok(Prepared {
        exports,
        controller,
        nbd: bounds,
        api,
        pid: state.pid,
    })
}

/// The disks of this process.
fn take_disks(
    options: &mut ServeOptions,
    (disks, mut files): (Vec<DiskState>, Descriptors),
    clients: Vec<Listener>,
    uptime: Duration,
) -> Result<(Objects, Vec<Option<Arriving>>), String> {
    let (mut arrivals, mut used) = (Vec::new(), Vec::new());
    options.disks.clear();
    for mut disk in disks {
        used.push(std::mem::take(&mut disk.used));
        let own = files.split_off_front(disk.files);
        let (disk, arrival) = take_apart(disk, own, options.nbd.is_some())?;
        options.disks.push(disk);
        arrivals.push(arrival);
    }
    let front_ends = options.disks.iter().map(|_| None).collect();
    let objects = Objects::open_held(options.clone(), front_ends, clients);
    let mut objects = objects.map_err(|error| error.to_string())?;
    objects.check_files(&used)?;
    let exports = objects.take(arrivals, uptime);
    Ok((objects, exports.map_err(|error| error.to_string())?))
}

type Taken = Option<(Arriving, Arrival)>;

fn take_apart(
    disk: DiskState,
    mut files: Descriptors,
    has_nbd: bool,
) -> Result<(DiskOptions, Taken), String> {
    let name = disk.table.name.clone();
    let keys = disk.table.check_keys();
    keys.map_err(|problem| format!("disk '{name}': {problem}"))?;
    let lent = taken(disk.lent, &mut files);
    let options = DiskOptions::of(disk.table, has_nbd);
    let mut options = options.map_err(|problem| format!("disk '{name}': {problem}"))?;
    // (A trace continues only if a client starts it again.)
    options.trace = None;
    options.disk.succeeds = true;
    options.disk.known_raw = true;
    options.disk.handover_state = lent.map_err(|problem| format!("disk '{name}': {problem}"))?;
    let taken = disk.export.map(|export| arrival(export, files));
    Ok((options, taken))
}

impl Prepared {
    /// Waits until all exports have completed a step.
    fn wait(&self) -> Result<(), String> {
        let mut exports = self.exports.iter().flatten();
        exports.try_for_each(Arriving::wait)
    }

    fn activate(&mut self, stopped: Stopped, mut files: Descriptors) -> Result<(), String> {
        let Stopped {
            bases,
            clients,
            left,
        } = stopped;
        let left = left.into_iter().map(|left| taken(left, &mut files));
        let left = left.collect::<Result<_, _>>()?;
        let handover_host = self
            .controller
            .handover_host()
            .map_err(|error| error.text)?;
        handover_host.restore(left)?;
        if bases.len() != self.exports.len() {
            return Err("the predecessor's disks are not those of the handover".into());
        }
        for (export, bases) in self.exports.iter().zip(bases) {
            export
                .iter()
                .for_each(|export| export.begin_to_activate(bases.clone()));
        }
        self.wait()?;
        // (Some exports have no front-end.)
        let handover_host = self
            .controller
            .handover_host()
            .map_err(|error| error.text)?;
        handover_host.adopt_clients(clients, &mut files)
    }

    fn run(mut self, peer: Peer) -> Received {
        let exports = self.exports.iter().flatten();
        exports.for_each(Arriving::run);
        if let Ok(handover_host) = self.controller.handover_host() {
            handover_host.own(self.nbd);
        }
        let pid = self.pid;
        let sockets = self
            .api
            .map(|(adopted, path, scale)| (ApiSockets::adopt(pid, adopted, path), scale));
        Received {
            controller: self.controller,
            sockets,
            peer,
        }
    }
}
