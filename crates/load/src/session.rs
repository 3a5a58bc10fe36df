//! The vhost-user connection: handshake, and start and stop of the queues. Messages are sent in the
//! same order as by QEMU.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures as Protocol,
};
use vhost::vhost_user::{Error as Broken, Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::dirty_log::DirtyLog;
use crate::error::{Error, Result};
use crate::features::{BlockConfig, Feature};
use crate::memory::{GUEST_BASE, GuestMemory};
use crate::message::{self, within};
use crate::packed_ring::INITIAL_BASE;
use crate::ring::{RingLayout, used_index};

/// Timeout for the server's replies in one exchange, such as the handshake.
const ANSWER: Duration = Duration::from_secs(20);
/// Interval between two attempts to reconnect.
const RETRY: Duration = Duration::from_millis(5);
/// VHOST_VRING_F_LOG.
const VRING_LOG: u32 = 1;

/// Features and limits that a server reports before any queue is started.
#[derive(Clone, Debug)]
pub struct Offer {
    pub features: u64,
    pub protocol: Protocol,
    /// Maximum number of queues of the server.
    pub queues: u64,
    pub memory_slots: Option<u64>,
    pub config: BlockConfig,
}

/// The eventfds of a queue.
#[derive(Debug)]
pub struct Events {
    /// Signalled by the driver when there are new requests.
    pub kick: EventFd,
    /// Signalled by the server when there are completions.
    pub call: EventFd,
    /// Signalled by the server when a queue has failed.
    pub err: EventFd,
}

impl Events {
    /// Creates the eventfds of a queue. With `sleeps`, reads from `call` block.
    pub fn new(sleeps: bool) -> Result<Events> {
        let make = |flags: i32| {
            EventFd::new(flags | libc::EFD_CLOEXEC).map_err(|e| Error::os("creating an eventfd", e))
        };
        Ok(Events {
            kick: make(libc::EFD_NONBLOCK)?,
            call: make(if sleeps { 0 } else { libc::EFD_NONBLOCK })?,
            err: make(libc::EFD_NONBLOCK)?,
        })
    }
}

/// A queue's ring and eventfds, as they are passed to the server.
#[derive(Debug)]
pub struct Wiring {
    pub ring: RingLayout,
    pub events: Arc<Events>,
}

/// The state that is sent to the server on every connection, including reconnects.
#[derive(Debug)]
pub struct Plan {
    /// Virtio features, without VHOST_USER_F_PROTOCOL_FEATURES.
    pub features: u64,
    pub memory: Arc<GuestMemory>,
    pub queues: Vec<Wiring>,
    pub log: Option<Arc<DirtyLog>>,
    /// Whether to use in-flight tracking.
    pub inflight: bool,
}

/// The server's in-flight area, which is kept when the server dies.
pub struct Inflight {
    description: VhostUserInflight,
    file: OwnedFd,
}

/// A connection to a server.
pub struct Session {
    frontend: Frontend,
    stream: UnixStream,
    offer: Offer,
    path: PathBuf,
}

fn msg<T>(what: &'static str, result: vhost::Result<T>) -> Result<T> {
    result.map_err(|cause| match cause {
        vhost::Error::VhostUserProtocol(
            Broken::SocketBroken(_) | Broken::Disconnected | Broken::PartialMessage,
        ) => Error::HungUp { what },
        cause => Error::Message { what, cause },
    })
}

impl Plan {
    /// Returns true if the driver uses indirect descriptors.
    pub fn is_indirect(&self) -> bool {
        Feature::INDIRECT_DESC.is_in(self.features)
    }
}

impl Session {
    /// Connects to a server and reads its features and limits.
    pub fn connect(path: &Path) -> Result<Session> {
        let connect = || -> io::Result<(UnixStream, UnixStream)> {
            let stream = UnixStream::connect(path)?;
            Ok((stream.try_clone()?, stream))
        };
        let (stream, other) = connect().map_err(|cause| Error::Connect {
            path: path.to_owned(),
            cause,
        })?;
        let mut frontend = Frontend::from_stream(other, 256);
        let offer = within(&stream, ANSWER, || learn(&mut frontend));
        let offer = offer.map_err(|error| match error {
            Error::HungUp { .. } => Error::Gone(
                "the server closed the connection at once; another front-end, such as a virtual \
                 machine, may use its disk"
                    .into(),
            ),
            other => other,
        })?;
        Ok(Session {
            frontend,
            stream,
            offer,
            path: path.to_owned(),
        })
    }

    /// Returns the features and limits of the server.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Returns the PID of the process that listens on the socket.
    pub fn peer_pid(&self) -> Result<u32> {
        let cred = rustix::net::sockopt::socket_peercred(&self.stream)
            .map_err(|e| Error::os("asking for the peer of the socket", e))?;
        Ok(cred.pid.as_raw_nonzero().get() as u32)
    }

    /// Sends features, memory and queues to the server, and starts the queues. The first successful
    /// call stores the server's in-flight area in `inflight`. A restarted server resumes from that
    /// area.
    pub fn start(&mut self, plan: &Plan, inflight: &mut Option<Inflight>) -> Result<()> {
        let (f, stream) = (&mut self.frontend, &self.stream);
        within(stream, ANSWER, || start(f, stream, plan, inflight))?;
        // Kick every queue: requests may have been made available while no server was connected.
        for queue in &plan.queues {
            kick(&queue.events.kick)?;
        }
        Ok(())
    }

    /// Stops the queues. Returns the position at which each would resume: the avail index of a
    /// split queue, or both positions of a packed one.
    pub fn stop(&mut self, queues: usize) -> Result<Vec<u32>> {
        let f = &mut self.frontend;
        within(&self.stream, ANSWER, || {
            for i in 0..queues {
                msg("SET_VRING_ENABLE", f.set_vring_enable(i, false))?;
            }
            (0..queues)
                .map(|i| msg("GET_VRING_BASE", f.get_vring_base(i)))
                .collect()
        })
    }

    /// Waits until the server closes the connection. Returns `false` after `time`.
    pub fn wait_hangup(&self, time: Duration) -> Result<bool> {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let time = Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&time)) {
            Ok(n) => Ok(n > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(Error::os("waiting for the server", e)),
        }
    }

    /// Connects again and starts the queues, within `limit`. The server may die again at any time,
    /// even during the handshake; then the attempt is repeated.
    pub fn reconnect(
        &mut self,
        plan: &Plan,
        inflight: &mut Option<Inflight>,
        limit: Duration,
        give_up: impl Fn() -> bool,
    ) -> Result<()> {
        let end = Instant::now() + limit;
        loop {
            let last = match self.try_again(plan, inflight) {
                Ok(()) => return Ok(()),
                Err(e @ Error::Refused { .. }) => return Err(e),
                Err(e) => e,
            };
            if Instant::now() > end || give_up() {
                return Err(Error::Gone(format!(
                    "the server closed the connection and did not accept another one: {last}"
                )));
            }
            std::thread::sleep(RETRY);
        }
    }

    fn try_again(&mut self, plan: &Plan, inflight: &mut Option<Inflight>) -> Result<()> {
        let mut session = Session::connect(&self.path)?;
        if session.offer.features & plan.features != plan.features {
            return Err(Error::Refused {
                feature: "what it offered before it closed the connection",
                hint: "a driver cannot give a feature back",
            });
        }
        session.start(plan, inflight)?;
        *self = session;
        Ok(())
    }
}

fn learn(f: &mut Frontend) -> Result<Offer> {
    let features = msg("GET_FEATURES", f.get_features())?;
    if !Feature::PROTOCOL_FEATURES.is_in(features) {
        return Err(Error::Refused {
            feature: "VHOST_USER_F_PROTOCOL_FEATURES",
            hint: "not a vhost-user-blk server, or one from before 2015",
        });
    }
    let protocol = msg("GET_PROTOCOL_FEATURES", f.get_protocol_features())?;
    if !protocol.contains(Protocol::CONFIG) {
        return Err(Error::Refused {
            feature: "VHOST_USER_PROTOCOL_F_CONFIG",
            hint: "not a vhost-user-blk server",
        });
    }
    let used = Protocol::MQ
        | Protocol::REPLY_ACK
        | Protocol::CONFIG
        | Protocol::LOG_SHMFD
        | Protocol::INFLIGHT_SHMFD
        | Protocol::CONFIGURE_MEM_SLOTS;
    let taken = protocol & used;
    msg("SET_PROTOCOL_FEATURES", f.set_protocol_features(taken))?;
    if taken.contains(Protocol::REPLY_ACK) {
        f.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    let queues = match taken.contains(Protocol::MQ) {
        true => msg("GET_QUEUE_NUM", f.get_queue_num())?,
        false => 1,
    };
    let memory_slots = match taken.contains(Protocol::CONFIGURE_MEM_SLOTS) {
        true => Some(msg("GET_MAX_MEM_SLOTS", f.get_max_mem_slots())?),
        false => None,
    };
    msg("SET_OWNER", f.set_owner())?;
    let blank = [0u8; BlockConfig::LEN];
    let flags = VhostUserConfigFlags::empty();
    let (_, config) = msg(
        "GET_CONFIG",
        f.get_config(0, BlockConfig::LEN as u32, flags, &blank),
    )?;
    Ok(Offer {
        features,
        protocol,
        queues,
        memory_slots,
        config: BlockConfig::parse(&config),
    })
}

fn start(
    f: &mut Frontend,
    stream: &UnixStream,
    plan: &Plan,
    inflight: &mut Option<Inflight>,
) -> Result<()> {
    let features = plan.features | Feature::PROTOCOL_FEATURES.mask();
    msg("SET_FEATURES", f.set_features(features))?;
    if plan.inflight {
        let area = match inflight {
            Some(area) => area,
            None => inflight.insert(get_inflight(f, plan)?),
        };
        let fd = area.file.as_raw_fd();
        msg("SET_INFLIGHT_FD", f.set_inflight_fd(&area.description, fd))?;
    }
    msg("SET_MEM_TABLE", f.set_mem_table(&[region(&plan.memory)]))?;
    for (i, queue) in plan.queues.iter().enumerate() {
        start_queue(f, stream, i, queue, plan)?;
    }
    if let Some(log) = &plan.log {
        message::set_log_base(stream, log)?;
    }
    for i in 0..plan.queues.len() {
        msg("SET_VRING_ENABLE", f.set_vring_enable(i, true))?;
    }
    Ok(())
}

fn get_inflight(f: &mut Frontend, plan: &Plan) -> Result<Inflight> {
    let size = plan.queues.iter().map(|q| q.ring.size).max().unwrap_or(0);
    let wanted = VhostUserInflight::new(0, 0, plan.queues.len() as u16, size);
    let (description, file) = msg("GET_INFLIGHT_FD", f.get_inflight_fd(&wanted))?;
    Ok(Inflight {
        description,
        file: file.into(),
    })
}

fn region(memory: &GuestMemory) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST_BASE,
        memory_size: memory.map().len() as u64,
        userspace_addr: memory.map().base() as u64,
        mmap_offset: 0,
        mmap_handle: memory.raw_fd(),
    }
}

fn start_queue(
    f: &Frontend,
    stream: &UnixStream,
    index: usize,
    queue: &Wiring,
    plan: &Plan,
) -> Result<()> {
    let ring = &queue.ring;
    msg("SET_VRING_NUM", f.set_vring_num(index, ring.size))?;
    // The used index in memory is valid even if the server has died. A packed ring has none: as
    // with QEMU, only the in-flight area tells a restarted server where its predecessor was.
    match ring.packed {
        false => {
            let base = used_index(&plan.memory, ring);
            msg("SET_VRING_BASE", f.set_vring_base(index, base))?;
        }
        true => message::set_vring_base(stream, index as u32, INITIAL_BASE)?,
    }
    let address = |offset: usize| plan.memory.map().base() as u64 + offset as u64;
    let addresses = VringConfigData {
        queue_max_size: ring.size,
        queue_size: ring.size,
        flags: if plan.log.is_some() { VRING_LOG } else { 0 },
        desc_table_addr: address(ring.desc),
        used_ring_addr: address(ring.used),
        avail_ring_addr: address(ring.avail),
        log_addr: Some(GuestMemory::guest_address(ring.used)),
    };
    msg("SET_VRING_ADDR", f.set_vring_addr(index, &addresses))?;
    let events = &queue.events;
    msg("SET_VRING_ERR", f.set_vring_err(index, &events.err))?;
    msg("SET_VRING_CALL", f.set_vring_call(index, &events.call))?;
    msg("SET_VRING_KICK", f.set_vring_kick(index, &events.kick))
}

/// Increments an eventfd. If its counter is full, it is signalled already.
pub fn kick(fd: &EventFd) -> Result<()> {
    match rustix::io::write(event_fd(fd), &1u64.to_ne_bytes()) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(e) => Err(Error::os("writing an eventfd", e)),
    }
}

/// Sleeps until a blocking eventfd is signalled, and reads it. Returns 0 after a signal interrupted
/// the read.
///
/// O_NONBLOCK is a property of the open file description, which the server shares. QEMU makes every
/// received descriptor non-blocking; this function then makes it blocking again. A single blocking
/// read is the cheapest way to sleep.
pub fn sleep_on(fd: &EventFd) -> Result<u64> {
    let mut count = [0u8; 8];
    loop {
        match rustix::io::read(event_fd(fd), &mut count) {
            Ok(_) => return Ok(u64::from_ne_bytes(count)),
            Err(rustix::io::Errno::INTR) => return Ok(0),
            Err(rustix::io::Errno::AGAIN) => rustix::io::ioctl_fionbio(event_fd(fd), false)
                .map_err(|e| Error::os("making an eventfd block", e))?,
            Err(e) => return Err(Error::os("reading an eventfd", e)),
        }
    }
}

/// Reads a non-blocking eventfd. Returns 0 if it is not signalled.
pub fn take(fd: &EventFd) -> Result<u64> {
    let mut count = [0u8; 8];
    match rustix::io::read(event_fd(fd), &mut count) {
        Ok(_) => Ok(u64::from_ne_bytes(count)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(0),
        Err(e) => Err(Error::os("reading an eventfd", e)),
    }
}

/// Borrows the descriptor, because `EventFd` does not implement `AsFd`.
fn event_fd(fd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open while it is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("path", &self.path)
            .field("fd", &self.stream.as_fd())
            .finish_non_exhaustive()
    }
}
