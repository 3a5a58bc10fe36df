//! Load on a vhost-user-blk server.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use crate::control::{Control, Phase};
use crate::cpu::ProcessCpu;
use crate::dirty_log::{DirtyLog, LogCheck};
use crate::error::{Error, Result};
use crate::features::{BlockConfig, Feature};
use crate::memory::{GuestMemory, Layout};
use crate::options::{Load, Options, Rw, SECTOR, VhostUser, Wait};
use crate::packed_ring::{PackedRing, base_after};
use crate::queue::{Manner, Queue, QueueLayout};
use crate::report::{Outcome, Report};
use crate::ring::{DriverRing, Ring, used_index};
use crate::run::{self, Geometry, Progress, Supervisor};
use crate::session::{self, Events, Inflight, Offer, Plan, Session, Wiring};
use crate::slots::Shape;

/// Runs the load, and then stops the queues.
pub fn run(
    options: &Options,
    server: &VhostUser,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Report> {
    let load = &options.load;
    let session = connect(server)?;
    let offer = session.offer();
    let features = choose_features(server, load, offer)?;
    let geometry = fit(load, offer)?;
    let shape = shape(server, load, &offer.config, features)?;
    let (plan, layouts) = plan(server, load, features, shape)?;
    let pid = match server.backend_pid {
        Some(pid) => pid,
        None => session.peer_pid()?,
    };
    let mut boss = Boss {
        session,
        plan,
        inflight: None,
        reconnect: server.reconnect,
        reconnects: 0,
        pid,
    };
    // Each layout of rings has its own compiled loop.
    let outcome = match server.packed {
        true => boss.run::<PackedRing>(options, server, geometry, &layouts, shape, progress),
        false => boss.run::<Ring>(options, server, geometry, &layouts, shape, progress),
    }?;
    let completed: Vec<u64> = outcome.measured.iter().map(|m| m.completed).collect();
    boss.stop(&completed)?;
    let mut report = Report::new(options, &outcome, Some(pid));
    report.reconnects = boss.reconnects;
    Ok(report)
}

/// Connects to the server. With `reconnect`, retries until that time is over.
fn connect(server: &VhostUser) -> Result<Session> {
    let end = server.reconnect.map(|limit| Instant::now() + limit);
    loop {
        match Session::connect(&server.socket) {
            Err(e @ Error::Refused { .. }) => return Err(e),
            Err(_) if end.is_some_and(|end| Instant::now() < end) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

fn choose_features(server: &VhostUser, load: &Load, offer: &Offer) -> Result<u64> {
    let refused = |feature: Feature, hint| {
        Err(Error::Refused {
            feature: feature.name(),
            hint,
        })
    };
    let has = |f: Feature| f.is_in(offer.features);
    if !has(Feature::VERSION_1) {
        return refused(Feature::VERSION_1, "legacy devices are not supported");
    }
    if server.indirect && !has(Feature::INDIRECT_DESC) {
        return refused(Feature::INDIRECT_DESC, "use --no-indirect");
    }
    if server.event_idx && !has(Feature::EVENT_IDX) {
        return refused(Feature::EVENT_IDX, "use --no-event-idx");
    }
    if server.packed && !has(Feature::RING_PACKED) {
        return refused(
            Feature::RING_PACKED,
            "use --packed off, or serve the disk with --packed",
        );
    }
    if has(Feature::RO) && load.writes() {
        return Err(Error::Options(format!(
            "the disk is read-only, --rw {} writes",
            load.rw.name()
        )));
    }
    let trims = load.rwmixtrim > 0 || matches!(load.rw, Rw::Trim | Rw::RandTrim);
    if trims && !has(Feature::DISCARD) {
        return refused(Feature::DISCARD, "the disk cannot be trimmed");
    }
    if load.rwmixzero > 0 && !has(Feature::WRITE_ZEROES) {
        return refused(Feature::WRITE_ZEROES, "leave --rwmixzero out");
    }
    if load.fsync > 0 && !has(Feature::FLUSH) {
        return refused(Feature::FLUSH, "leave --fsync out");
    }
    if server.log && (!has(Feature::LOG_ALL) || !offer.protocol.contains(Protocol::LOG_SHMFD)) {
        return refused(Feature::LOG_ALL, "the server has no dirty log");
    }
    if server.inflight && !offer.protocol.contains(Protocol::INFLIGHT_SHMFD) {
        return Err(Error::Refused {
            feature: "INFLIGHT_SHMFD",
            hint: "requests in flight would be lost with the server",
        });
    }
    Ok(wanted(server) & offer.features)
}

/// Returns the features that a guest's driver accepts if they are offered.
fn wanted(server: &VhostUser) -> u64 {
    let mut wanted = [
        Feature::VERSION_1,
        Feature::SIZE_MAX,
        Feature::SEG_MAX,
        Feature::RO,
        Feature::BLK_SIZE,
        Feature::FLUSH,
        Feature::TOPOLOGY,
        Feature::CONFIG_WCE,
        Feature::MQ,
        Feature::DISCARD,
        Feature::WRITE_ZEROES,
    ]
    .iter()
    .fold(0, |bits, f| bits | f.mask());
    if server.indirect {
        wanted |= Feature::INDIRECT_DESC.mask();
    }
    if server.event_idx {
        wanted |= Feature::EVENT_IDX.mask();
    }
    if server.packed {
        wanted |= Feature::RING_PACKED.mask();
    }
    if server.log {
        wanted |= Feature::LOG_ALL.mask();
    }
    wanted
}

fn fit(load: &Load, offer: &Offer) -> Result<Geometry> {
    let config = &offer.config;
    if u64::from(load.queues) > offer.queues {
        return Err(Error::Options(format!(
            "--queues {}: the server has {}",
            load.queues, offer.queues
        )));
    }
    let align = match Feature::BLK_SIZE.is_in(offer.features) {
        true => config.blk_size,
        false => SECTOR,
    };
    let capacity = config.capacity.saturating_mul(u64::from(SECTOR));
    Geometry::new(load, capacity, align)
}

/// Adapts a request's descriptors to the device's limits.
fn shape(server: &VhostUser, load: &Load, config: &BlockConfig, features: u64) -> Result<Shape> {
    let mut segment = server.segment_size.unwrap_or(load.bs).min(load.bs);
    if Feature::SIZE_MAX.is_in(features) && config.size_max >= SECTOR {
        segment = segment.min(config.size_max - config.size_max % SECTOR);
    }
    let segments = load.bs.div_ceil(segment);
    let most = match Feature::SEG_MAX.is_in(features) {
        true => config.seg_max.max(1),
        false => u32::from(u16::MAX) - 2,
    };
    if segments > most {
        return Err(Error::Options(format!(
            "--bs {} needs {segments} segments of {segment} bytes, the device takes {most}",
            load.bs
        )));
    }
    let ring = u32::from(server.ring_size(load)?);
    if !server.indirect && (segments + 2) * u32::from(load.iodepth) > ring {
        return Err(Error::Options(format!(
            "without indirect descriptors {} requests of {segments} segments do not fit a ring \
             of {ring}; give --queue-size",
            load.iodepth
        )));
    }
    Ok(Shape {
        slots: load.iodepth,
        len: load.bs,
        segment,
        indirect: server.indirect,
        packed: server.packed,
    })
}

/// Creates the layout of the guest's memory, the memory itself and the queues.
fn plan(
    server: &VhostUser,
    load: &Load,
    features: u64,
    shape: Shape,
) -> Result<(Plan, Vec<QueueLayout>)> {
    let size = server.ring_size(load)?;
    let mut layout = Layout::default();
    let layouts: Vec<QueueLayout> = (0..load.queues)
        .map(|_| QueueLayout::new(&mut layout, size, shape))
        .collect();
    let memory = Arc::new(GuestMemory::new(layout.len())?);
    let log = match server.log {
        true => Some(Arc::new(DirtyLog::new(&memory)?)),
        false => None,
    };
    let wire = |l: &QueueLayout| {
        Ok(Wiring {
            ring: l.ring,
            events: Arc::new(Events::new(server.wait == Wait::Interrupt)?),
        })
    };
    let plan = Plan {
        features,
        queues: layouts.iter().map(wire).collect::<Result<_>>()?,
        memory,
        log,
        inflight: server.inflight,
    };
    Ok((plan, layouts))
}

fn make_queue<R: DriverRing>(
    server: &VhostUser,
    load: &Load,
    plan: &Plan,
    layout: QueueLayout,
    shape: Shape,
    index: usize,
) -> Result<Queue<R>> {
    let check = |log: &Arc<DirtyLog>| LogCheck::new(log.clone(), index, &plan.memory);
    let manner = Manner {
        index,
        event_idx: server.event_idx,
        wait: server.wait,
        strict: load.verify,
        log: plan.log.as_ref().map(check),
    };
    let events = plan.queues[index].events.clone();
    let queue = Queue::new(plan.memory.clone(), layout, shape, events, manner)?;
    queue.scribble(load.seed);
    Ok(queue)
}

/// Owns the connection while the workers run.
struct Boss {
    session: Session,
    plan: Plan,
    inflight: Option<Inflight>,
    reconnect: Option<Duration>,
    reconnects: u32,
    pid: u32,
}

impl Boss {
    fn start(&mut self) -> Result<()> {
        match self.session.start(&self.plan, &mut self.inflight) {
            Err(_) if self.reconnect.is_some() => self.come_back(|| false),
            result => result,
        }
    }

    /// Starts the queues and runs the load.
    fn run<R: DriverRing>(
        &mut self,
        options: &Options,
        server: &VhostUser,
        geometry: Geometry,
        layouts: &[QueueLayout],
        shape: Shape,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Outcome> {
        let load = &options.load;
        let make = |(i, layout): (usize, &QueueLayout)| {
            let queue = make_queue::<R>(server, load, &self.plan, *layout, shape, i)?;
            Ok(move || Ok(queue))
        };
        let ports = layouts.iter().enumerate().map(make);
        let ports = ports.collect::<Result<Vec<_>>>()?;
        self.start()?;
        run::run(load, geometry, ports, self, progress)
    }

    /// Returns whether a queue that has stopped at `base` has processed `sent` requests.
    fn has_processed(&self, queue: usize, base: u32, sent: u64) -> bool {
        let ring = &self.plan.queues[queue].ring;
        match ring.packed {
            false => base == u32::from(sent as u16),
            true if self.plan.is_indirect() => base == base_after(sent, ring.size),
            // Requests take different numbers of descriptors.
            true => base & 0xffff == base >> 16,
        }
    }

    /// Stops the queues, and checks that each has processed exactly the requests that were sent.
    fn stop(&mut self, completed: &[u64]) -> Result<()> {
        let bases = loop {
            match self.session.stop(completed.len()) {
                Ok(bases) => break bases,
                // The server may die here, too.
                Err(_) if self.reconnect.is_some() => self.come_back(|| false)?,
                Err(e) => return Err(e),
            }
        };
        for (queue, (base, sent)) in bases.iter().zip(completed).enumerate() {
            if !self.has_processed(queue, *base, *sent) {
                return Err(Error::Device {
                    queue,
                    what: format!("GET_VRING_BASE says {base:#x} after {sent} requests"),
                });
            }
        }
        Ok(())
    }

    fn hung_up(&mut self, control: &Control) -> Result<bool> {
        if control.all_finished() {
            return Ok(false);
        }
        if self.reconnect.is_none() {
            return Err(Error::Gone(format!(
                "the server closed the connection after {} requests",
                control.completed()
            )));
        }
        self.come_back(|| control.phase() == Phase::Abort)?;
        // Wake the workers: the dead server may have published completions without an interrupt.
        self.wake();
        Ok(true)
    }

    fn come_back(&mut self, give_up: impl Fn() -> bool) -> Result<()> {
        let limit = self.reconnect.unwrap_or_default();
        self.session
            .reconnect(&self.plan, &mut self.inflight, limit, give_up)?;
        self.reconnects += 1;
        Ok(())
    }
}

impl Supervisor for Boss {
    fn wait(&mut self, time: Duration, control: &Control) -> Result<bool> {
        if self.session.wait_hangup(time)? {
            return self.hung_up(control);
        }
        for (queue, wiring) in self.plan.queues.iter().enumerate() {
            if session::take(&wiring.events.err)? > 0 {
                return Err(Error::Device {
                    queue,
                    what: "the server reports an error on the ring".into(),
                });
            }
        }
        Ok(false)
    }

    fn wake(&self) {
        for queue in &self.plan.queues {
            // If an eventfd cannot be written, no worker can sleep on it either.
            let _ = session::kick(&queue.events.call);
        }
    }

    fn backend_cpu(&self) -> Option<ProcessCpu> {
        match self.reconnects {
            0 => ProcessCpu::read(self.pid),
            _ => None,
        }
    }

    fn diagnose(&self, queue: usize, completed: u64, in_flight: u32) -> String {
        if self.plan.queues[queue].ring.packed {
            return "the server has not answered, or has sent no interrupt".into();
        }
        let used = used_index(&self.plan.memory, &self.plan.queues[queue].ring);
        let unseen = used.wrapping_sub(completed as u16);
        if unseen == 0 || u32::from(unseen) > in_flight {
            return "the server has not answered".into();
        }
        format!("the server completed {unseen} and sent no interrupt")
    }
}

/// Features and limits of a server, for `--info`.
#[derive(Clone, Debug, Serialize)]
pub struct ServerInfo {
    /// Id of the process at the other end of the socket.
    pub pid: u32,
    /// Names of the offered virtio features; unknown bits are described by their number.
    pub features: Vec<String>,
    /// Names of the offered vhost-user protocol features.
    pub protocol_features: Vec<String>,
    /// Maximum number of virtqueues; 1 without the protocol feature MQ.
    pub queues: u64,
    /// Maximum number of memory regions; `None` without CONFIGURE_MEM_SLOTS.
    pub memory_slots: Option<u64>,
    /// Configuration space of the virtio-blk device.
    pub config: BlockConfig,
}

/// Connects to a server, reads its features and limits, and disconnects.
pub fn info(socket: &Path) -> Result<ServerInfo> {
    let session = Session::connect(socket)?;
    let offer = session.offer();
    Ok(ServerInfo {
        pid: session.peer_pid()?,
        features: Feature::names(offer.features),
        protocol_features: offer
            .protocol
            .iter_names()
            .map(|(name, _)| name.to_owned())
            .collect(),
        queues: offer.queues,
        memory_slots: offer.memory_slots,
        config: offer.config,
    })
}

impl std::fmt::Display for ServerInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let c = &self.config;
        writeln!(f, "server process:    {}", self.pid)?;
        writeln!(f, "features:          {}", self.features.join(" "))?;
        writeln!(f, "protocol features: {}", self.protocol_features.join(" "))?;
        writeln!(f, "queues:            {}", self.queues)?;
        if let Some(slots) = self.memory_slots {
            writeln!(f, "memory slots:      {slots}")?;
        }
        writeln!(
            f,
            "capacity:          {} bytes",
            u128::from(c.capacity) * 512
        )?;
        writeln!(
            f,
            "block size:        {} (physical exponent {}, minimum {}, optimal {})",
            c.blk_size, c.physical_block_exp, c.min_io_size, c.opt_io_size
        )?;
        writeln!(
            f,
            "segments:          {} of {} bytes",
            c.seg_max, c.size_max
        )?;
        writeln!(f, "write cache:       {}", c.writeback)?;
        writeln!(f, "config queues:     {}", c.num_queues)?;
        writeln!(
            f,
            "discard:           {} sectors, {} segments, alignment {}",
            c.max_discard_sectors, c.max_discard_seg, c.discard_sector_alignment
        )?;
        writeln!(
            f,
            "write zeroes:      {} sectors, {} segments, may unmap {}",
            c.max_write_zeroes_sectors, c.max_write_zeroes_seg, c.write_zeroes_may_unmap
        )
    }
}
