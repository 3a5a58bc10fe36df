//! The virtqueues: their settings, and when they run.
//!
//! SET_VRING_KICK starts a vring, and GET_VRING_BASE stops it. A vring runs, which means that it is
//! attached to its worker, while it is started, enabled, and completely set up. A worker checks a
//! source as soon as it is attached, so earlier kicks are not lost.
//!
//! The eventfds of a running vring are replaced while its requests stay in flight: guests mask and
//! unmask their interrupts, and front-ends wait for the acknowledgement.

use super::{Fault, Reply, Session};
use crate::vhost_user::codec::VringAddr;
use fathom_core::{Detaching, DiskError, Eventfd, Source, SourceId};
use fathom_units::cause;
use fathom_virtio::{BlkQueue, PackedBlkQueue, QueueSetup, signal};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};

/// Settings of one virtqueue.
#[derive(Default)]
pub struct Vring {
    /// Number of entries; 0 if it has not been set.
    pub(super) size: u16,
    pub(super) addr: Option<VringAddr>,
    /// Position in the ring, as in SET_VRING_BASE: none if it has not been set, and outdated while
    /// the vring runs.
    pub(super) base: Option<u32>,
    /// Kick eventfd; the vring is started if there is one.
    pub(super) kick: Option<OwnedFd>,
    pub(super) call: Option<OwnedFd>,
    pub(super) err: Option<OwnedFd>,
    pub(super) enabled: bool,
    running: Option<Running>,
}

#[derive(Clone, Copy)]
struct Running {
    worker: usize,
    id: SourceId,
}

impl Vring {
    fn eventfd(&mut self, which: Eventfd) -> &mut Option<OwnedFd> {
        match which {
            Eventfd::Kick => &mut self.kick,
            Eventfd::Call => &mut self.call,
            Eventfd::Err => &mut self.err,
        }
    }

    /// Resets all settings. The vring must not be running.
    pub fn reset(&mut self) {
        debug_assert!(self.running.is_none());
        *self = Vring::default();
    }
}

/// Duplicates an eventfd, since a queue that fails to start drops its file descriptors.
fn duplicate(fd: &Option<OwnedFd>) -> Result<Option<OwnedFd>, Fault> {
    let copy = fd.as_ref().map(OwnedFd::try_clone).transpose();
    copy.map_err(|e| Fault::Refused(format!("cannot duplicate an eventfd: {}", cause(e))))
}

/// Refuses a file that cannot be an eventfd: other files are always readable, and the worker would
/// never sleep.
///
/// Anonymous inodes such as eventfds have no file type. The check uses cached attributes only,
/// since the front-end may control the file system and delay its replies.
pub(super) fn check_eventfd(fd: &OwnedFd) -> Result<(), Fault> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(fd, "", flags, StatxFlags::TYPE)
        .map_err(|e| Fault::Refused(format!("not an eventfd: {}", cause(e))))?;
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::Unknown => Ok(()),
        other => Err(Fault::Refused(format!(
            "not an eventfd but a file descriptor of type {other:?}"
        ))),
    }
}

/// Returns the position at which a queue has stopped.
fn end_position(queue: Box<dyn Any>) -> u32 {
    match queue.downcast::<BlkQueue>() {
        Ok(split) => split.base(),
        Err(other) => {
            let packed = other.downcast::<PackedBlkQueue>();
            packed.expect("only queues are attached").base()
        }
    }
}

impl Session<'_> {
    /// Returns the position of a vring, as in SET_VRING_BASE.
    pub(super) fn base_of(&self, vring: &Vring) -> u32 {
        vring.base.unwrap_or(self.features.initial_base())
    }

    pub(super) fn set_vring_num(&mut self, index: u32, num: u32) -> Result<Reply, Fault> {
        let i = self.stopped_vring(index)?;
        // The queue checks the size when it starts.
        self.vrings[i].size = u16::try_from(num)
            .map_err(|_| Fault::Refused(format!("vring {i}: size {num} is too large")))?;
        Ok(Reply::Ack)
    }

    pub(super) fn set_vring_base(&mut self, index: u32, base: u32) -> Result<Reply, Fault> {
        let i = self.stopped_vring(index)?;
        if !self.features.packed() && base > u16::MAX.into() {
            return Err(Fault::Refused(format!(
                "vring {i}: base {base} is too large"
            )));
        }
        self.vrings[i].base = Some(base);
        Ok(Reply::Ack)
    }

    pub(super) fn set_vring_addr(&mut self, index: u32, addr: VringAddr) -> Result<Reply, Fault> {
        self.change_vring(index, |vring| vring.addr = Some(addr))
    }

    pub(super) fn set_vring_kick(
        &mut self,
        index: u32,
        fd: Option<OwnedFd>,
    ) -> Result<Reply, Fault> {
        let fd = fd.ok_or_else(|| {
            Fault::Refused(format!(
                "vring {index}: has no kick eventfd, which this server needs"
            ))
        })?;
        check_eventfd(&fd)?;
        self.set_eventfd(index, Eventfd::Kick, Some(fd))
    }

    pub(super) fn set_vring_call(
        &mut self,
        index: u32,
        fd: Option<OwnedFd>,
    ) -> Result<Reply, Fault> {
        fd.as_ref().map_or(Ok(()), check_eventfd)?;
        self.set_eventfd(index, Eventfd::Call, fd)?;
        // As in QEMU's libvhost-user: interrupts for earlier completions may have been lost, and
        // some drivers wait for them. The queue of a running vring signals by itself.
        let vring = &self.vrings[self.vring(index)?];
        if vring.running.is_none() && signal(vring.call.as_ref()).is_err() {
            // The front-end's eventfd has been replaced by another one, which no process reads.
            tracing::warn!(
                "vhost-user: vring {index}: its call eventfd was already full, so the guest gets \
                 no interrupts"
            );
        }
        Ok(Reply::Ack)
    }

    pub(super) fn set_vring_err(
        &mut self,
        index: u32,
        fd: Option<OwnedFd>,
    ) -> Result<Reply, Fault> {
        fd.as_ref().map_or(Ok(()), check_eventfd)?;
        self.set_eventfd(index, Eventfd::Err, fd)
    }

    pub(super) fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<Reply, Fault> {
        let i = self.vring(index)?;
        if self.vrings[i].enabled == enable {
            return Ok(Reply::Ack);
        }
        self.change_vring(index, |vring| vring.enabled = enable)
    }

    /// Stops a vring: all requests in flight complete, and nothing accesses the guest's memory for
    /// this vring afterwards.
    pub(super) fn get_vring_base(&mut self, index: u32) -> Result<Reply, Fault> {
        let i = self.vring(index)?;
        self.pause(i..i + 1);
        self.vrings[i].kick = None;
        self.deactivate_if_idle();
        let mut state = index.to_ne_bytes().to_vec();
        state.extend_from_slice(&self.base_of(&self.vrings[i]).to_ne_bytes());
        Ok(Reply::Payload(state, None))
    }

    /// Stops all vrings.
    pub(super) fn stop_all(&mut self) {
        self.pause(0..self.vrings.len());
        self.vrings.iter_mut().for_each(|vring| vring.kick = None);
        self.deactivate_if_idle();
    }

    /// Makes a change while no queue runs, and restarts the queues that can run. The error is that
    /// of the first queue that should run but cannot.
    pub(super) fn while_paused(&mut self, change: impl FnOnce(&mut Self)) -> Result<(), Fault> {
        let all = 0..self.vrings.len();
        self.pause(all.clone());
        change(self);
        let mut outcome = Ok(());
        for i in all {
            // If one queue does not start, the others still do.
            outcome = outcome.and(self.start(i));
        }
        outcome
    }

    fn vring(&self, index: u32) -> Result<usize, Fault> {
        let count = self.vrings.len();
        let i = usize::try_from(index).ok().filter(|i| *i < count);
        i.ok_or_else(|| {
            Fault::Refused(format!(
                "vring {index}: exceeds the disk's limit of {count} vrings"
            ))
        })
    }

    fn stopped_vring(&self, index: u32) -> Result<usize, Fault> {
        let i = self.vring(index)?;
        if self.vrings[i].running.is_some() {
            return Err(Fault::Refused(format!("vring {i}: is running")));
        }
        Ok(i)
    }

    fn change_vring(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Vring),
    ) -> Result<Reply, Fault> {
        let i = self.vring(index)?;
        self.pause(i..i + 1);
        change(&mut self.vrings[i]);
        self.start(i).inspect_err(|_| {
            // A refused request does not leave the vring started.
            self.vrings[i].kick = None;
            self.deactivate_if_idle();
        })?;
        Ok(Reply::Ack)
    }

    /// Replaces an eventfd of a vring. A running vring keeps its requests in flight, and its worker
    /// uses the new eventfd from the acknowledgement on.
    fn set_eventfd(
        &mut self,
        index: u32,
        which: Eventfd,
        fd: Option<OwnedFd>,
    ) -> Result<Reply, Fault> {
        let i = self.vring(index)?;
        let Some(Running { worker, id }) = self.vrings[i].running else {
            return self.change_vring(index, |vring| *vring.eventfd(which) = fd);
        };
        let copy = duplicate(&fd)?;
        match self.shared.workers[worker].set_eventfd(id, which, copy) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let problem = format!("vring {i}: cannot watch its kick eventfd: {}", cause(error));
                return Err(Fault::Refused(problem));
            }
            Err(unheard) => tracing::warn!(
                "vhost-user: vring {i}: {unheard}; it still uses the previous eventfd"
            ),
        }
        *self.vrings[i].eventfd(which) = fd;
        Ok(Reply::Ack)
    }

    /// Detaches the running vrings of this range after their requests in flight have completed.
    pub(super) fn pause(&mut self, which: std::ops::Range<usize>) {
        let mut detaching: Vec<(usize, Detaching)> = Vec::new();
        for i in which {
            if let Some(Running { worker, id }) = self.vrings[i].running.take() {
                detaching.push((i, self.shared.workers[worker].begin_detach(id)));
            }
        }
        let count = detaching.len();
        if count == 0 {
            return;
        }
        for (i, detaching) in detaching {
            let base = end_position(detaching.wait().into_any());
            self.vrings[i].base = Some(base);
            tracing::debug!("vhost-user: vring {i} stopped at {base:#x}");
        }
        self.shared
            .update_status(|status| status.queues_running -= count);
    }

    /// Attaches a vring if it should run.
    fn start(&mut self, i: usize) -> Result<(), Fault> {
        let Some(queue) = self.build(i)? else {
            return Ok(());
        };
        self.activate()?;
        self.attach(i, queue)
    }

    /// Attaches a queue to its worker. The disk must be activated.
    pub(super) fn attach(&mut self, i: usize, mut source: Box<dyn Source>) -> Result<(), Fault> {
        let worker = i % self.shared.workers.len();
        if let Some(wrap) = &self.shared.wrap {
            source = wrap(source);
        }
        let id = self.shared.workers[worker]
            .attach(source)
            .map_err(|e| Fault::Fatal(format!("vring {i}: cannot be started: {}", cause(e))))?;
        self.vrings[i].running = Some(Running { worker, id });
        self.shared
            .update_status(|status| status.queues_running += 1);
        tracing::debug!("vhost-user: vring {i} runs on worker {worker}");
        Ok(())
    }

    /// Creates the queue of a vring; None if the vring should not run.
    pub(super) fn build(&self, i: usize) -> Result<Option<Box<dyn Source>>, Fault> {
        let vring = &self.vrings[i];
        let enabled = vring.enabled || !self.features.rings_need_enable();
        let (Some(memory), Some(addr), Some(kick)) =
            (self.memory.memory(), vring.addr, &vring.kick)
        else {
            return Ok(None);
        };
        if !enabled || vring.size == 0 {
            return Ok(None);
        }
        let index = i as u16;
        let problem = |problem| Fault::Refused(format!("vring {i}: {problem}"));
        let log = self.current_log().map_err(problem)?;
        let region = self.current_inflight(index, vring.size).map_err(problem)?;
        let log_used = addr.flags & VringAddr::F_LOG != 0;
        let kick = kick.as_fd().try_clone_to_owned();
        let setup = QueueSetup {
            index,
            size: vring.size,
            desc_addr: addr.desc,
            avail_addr: addr.avail,
            used_addr: addr.used,
            log_addr: log_used.then_some(addr.log),
            base: self.base_of(vring),
            features: self.features.acked,
            kick: kick
                .map_err(|e| problem(format!("cannot duplicate an eventfd: {}", cause(e))))?,
            call: duplicate(&vring.call)?,
            err: duplicate(&vring.err)?,
        };
        let device = self.shared.device.clone();
        let memory = memory.clone();
        // The layout is chosen here, once, and not for each request.
        let queue = if self.features.packed() {
            let region = region.map(|region| region.packed());
            let queue = PackedBlkQueue::new(setup, memory, log, region, device);
            queue.map_err(Fault::refused)?.into_source()
        } else {
            let region = region.map(|region| region.split());
            let queue = BlkQueue::new(setup, memory, log, region, device);
            queue.map_err(Fault::refused)?.into_source()
        };
        Ok(Some(queue))
    }

    pub(super) fn activate(&mut self) -> Result<(), Fault> {
        if !self.active {
            let disk = &self.shared.disk;
            disk.set_saved_state(self.saved_state());
            disk.activate().map_err(|e| Fault::Fatal(e.to_string()))?;
            self.active = true;
        }
        Ok(())
    }

    /// Releases the disk after the last vring has stopped, so that another process may use it, for
    /// example at the destination of a live migration.
    fn deactivate_if_idle(&mut self) {
        if self.vrings.iter().all(|vring| vring.kick.is_none()) {
            self.deactivate();
        }
    }

    /// Releases the disk and logs errors. No vring may be running.
    pub(super) fn deactivate(&mut self) {
        if let Err(error) = self.try_to_deactivate() {
            tracing::error!("vhost-user: {error}");
        }
    }

    /// Releases the disk. The disk is released even if an error is returned.
    pub(super) fn try_to_deactivate(&mut self) -> Result<(), DiskError> {
        match std::mem::take(&mut self.active) {
            true => self.shared.disk.deactivate(),
            false => Ok(()),
        }
    }
}
