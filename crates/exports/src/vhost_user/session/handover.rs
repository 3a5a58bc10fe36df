//! Hands over a session to another process: the settings that its front-end has made, and the
//! positions of its queues.

use super::back_channel::BackChannel;
use super::vrings::check_eventfd;
use super::{Fault, Session};
use crate::vhost_user::codec::{Inflight, Receiver, Region, VringAddr};
use crate::vhost_user::mapping::Mapping;
use fathom_core::Source;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use fathom_virtio::features::{F_RING_PACKED, OF_DISK};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::OwnedFd;

/// Saved state of a session. File numbers are indices into the list of files that accompanies it.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionState {
    features: u64,
    protocol_features: u64,
    memory: Vec<RegionState>,
    log: Option<AreaState>,
    inflight: Option<InflightState>,
    vrings: Vec<VringState>,
    back_channel: Option<usize>,
    device_status: u8,
    writeback: bool,
    /// The received part of an incomplete reply on the back channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unfinished_reply: Option<UnfinishedState>,
}

/// The received part of a message. The bytes cannot be received again, so the successor continues
/// after them.
#[derive(Debug, Serialize, Deserialize)]
pub struct UnfinishedState {
    /// Bytes from the start of the header.
    bytes: Vec<u8>,
    /// File descriptors that arrived with the bytes.
    files: Vec<usize>,
}

impl UnfinishedState {
    /// Saves the state of a receiver; None if no byte of a message has arrived.
    pub fn of(
        receiver: &Receiver,
        descriptors: &mut Descriptors,
    ) -> io::Result<Option<UnfinishedState>> {
        let Some((bytes, fds)) = receiver.unfinished() else {
            return Ok(None);
        };
        let files = fds.iter().map(|fd| descriptors.add(fd));
        let files = files.collect::<io::Result<_>>()?;
        Ok(Some(UnfinishedState { bytes, files }))
    }

    /// Creates the successor's receiver. The error is for the user.
    pub fn resume(self, descriptors: &mut Descriptors) -> Result<Receiver, String> {
        let fds = self.files.into_iter().map(|file| descriptors.take(file));
        let fds = fds.collect::<Result<_, _>>()?;
        Receiver::resume(self.bytes, fds).map_err(|error| error.to_string())
    }
}

impl SessionState {
    /// Returns true if a successor must be able to continue an incomplete reply.
    pub fn has_unfinished_reply(&self) -> bool {
        self.unfinished_reply.is_some()
    }

    /// Returns true if the guest's driver uses packed virtqueues.
    pub fn has_packed_queues(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }
}

/// A mapped range of a file.
#[derive(Debug, Serialize, Deserialize)]
struct AreaState {
    file: usize,
    offset: u64,
    len: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct RegionState {
    guest_addr: u64,
    user_addr: u64,
    area: AreaState,
}

#[derive(Debug, Serialize, Deserialize)]
struct InflightState {
    area: AreaState,
    queues: u16,
    queue_size: u16,
}

#[derive(Debug, Serialize, Deserialize)]
struct VringState {
    size: u16,
    /// The fields flags, desc, used, avail and log of [`VringAddr`].
    addr: Option<(u32, u64, u64, u64, u64)>,
    base: u32,
    kick: Option<usize>,
    call: Option<usize>,
    err: Option<usize>,
    enabled: bool,
}

impl AreaState {
    fn of(mapping: &Mapping, descriptors: &mut Descriptors) -> io::Result<AreaState> {
        let (file, offset) = mapping.file();
        Ok(AreaState {
            file: descriptors.add(file)?,
            offset,
            len: mapping.len() as u64,
        })
    }
}

/// Queues that are ready to run, with their indices.
pub struct Ready(Vec<(usize, Box<dyn Source>)>);

impl Session<'_> {
    /// Describes the session; its queues may keep running. The error is for the user.
    pub fn describe(&self, descriptors: &mut Descriptors) -> Result<SessionState, String> {
        let state = self.try_to_describe(descriptors);
        state.map_err(|error| format!("cannot duplicate a file descriptor: {}", cause(error)))
    }

    fn try_to_describe(&self, descriptors: &mut Descriptors) -> io::Result<SessionState> {
        let mut memory = Vec::new();
        for mapped in &self.memory.regions {
            memory.push(RegionState {
                guest_addr: mapped.region.guest_addr,
                user_addr: mapped.region.user_addr,
                area: AreaState::of(&mapped.mapping, descriptors)?,
            });
        }
        let mut vrings = Vec::new();
        for vring in &self.vrings {
            let addr = |a: VringAddr| (a.flags, a.desc, a.used, a.avail, a.log);
            vrings.push(VringState {
                size: vring.size,
                addr: vring.addr.map(addr),
                base: self.base_of(vring),
                kick: descriptors.add_any(vring.kick.as_ref())?,
                call: descriptors.add_any(vring.call.as_ref())?,
                err: descriptors.add_any(vring.err.as_ref())?,
                enabled: vring.enabled,
            });
        }
        let channel = self.back_channel.as_ref().map(BackChannel::receiver);
        let unfinished = channel.map(|receiver| UnfinishedState::of(receiver, descriptors));
        let log = self.log.as_ref();
        let log = log.map(|log| AreaState::of(&log.mapping, descriptors));
        let inflight = self.inflight.as_ref().map(|inflight| {
            Ok::<_, io::Error>(InflightState {
                area: AreaState::of(&inflight.mapping, descriptors)?,
                queues: inflight.queues,
                queue_size: inflight.queue_size,
            })
        });
        Ok(SessionState {
            features: self.features.acked,
            protocol_features: self.features.protocol,
            memory,
            log: log.transpose()?,
            inflight: inflight.transpose()?,
            vrings,
            back_channel: descriptors.add_any(self.back_channel().as_ref())?,
            device_status: self.device_status,
            writeback: self.shared.device.writeback(),
            unfinished_reply: unfinished.transpose()?.flatten(),
        })
    }

    /// Restores a session that another process described; no queue runs yet. The state is validated
    /// like messages from a front-end.
    pub fn adopt(
        &mut self,
        state: SessionState,
        descriptors: &mut Descriptors,
    ) -> Result<(), String> {
        let adopted = self.try_to_adopt(state, descriptors);
        adopted.map_err(|(Fault::Refused(problem) | Fault::Fatal(problem))| problem)
    }

    fn try_to_adopt(
        &mut self,
        state: SessionState,
        descriptors: &mut Descriptors,
    ) -> Result<(), Fault> {
        let unfinished = state.unfinished_reply;
        let unfinished = unfinished.map(|message| message.resume(descriptors));
        let unfinished = unfinished.transpose().map_err(Fault::Refused)?;
        let mut take = |number| descriptors.take(number).map_err(Fault::Refused);
        self.set_protocol_features(state.protocol_features)?;
        self.features.kept = state.features & (OF_DISK | F_RING_PACKED);
        self.set_features(state.features)?;
        let mut regions = Vec::new();
        for RegionState {
            guest_addr,
            user_addr,
            area,
        } in state.memory
        {
            let region = Region {
                guest_addr,
                user_addr,
                size: area.len,
                mmap_offset: area.offset,
            };
            regions.push((region, take(area.file)?));
        }
        if !regions.is_empty() {
            self.set_mem_table(regions)?;
        }
        if let Some(AreaState { file, offset, len }) = state.log {
            self.set_log_base(len, offset, take(file)?)?;
        }
        if let Some(inflight) = state.inflight {
            let area = Inflight {
                mmap_size: inflight.area.len,
                mmap_offset: inflight.area.offset,
                num_queues: inflight.queues,
                queue_size: inflight.queue_size,
                wire_len: 0,
            };
            self.set_inflight_fd(area, take(inflight.area.file)?)?;
        }
        if let Some(socket) = state.back_channel {
            self.set_backend_req_fd(take(socket)?)?;
            if let Some((channel, receiver)) = self.back_channel.as_mut().zip(unfinished) {
                channel.resume(receiver);
            }
        }
        self.device_status = state.device_status;
        // Writes may stay volatile only if the cache was known to be volatile: only then does the
        // guest flush.
        let device = &self.shared.device;
        device.set_writeback(state.writeback && device.info().write_cache);
        self.adopt_vrings(state.vrings, &mut take)
    }

    fn adopt_vrings(
        &mut self,
        vrings: Vec<VringState>,
        take: &mut impl FnMut(usize) -> Result<OwnedFd, Fault>,
    ) -> Result<(), Fault> {
        let most = self.vrings.len();
        if vrings.len() > most {
            let problem = format!("{} vrings exceed the disk's limit of {most}", vrings.len());
            return Err(Fault::Refused(problem));
        }
        let mut event = |number: Option<usize>| {
            let fd = number.map(&mut *take).transpose()?;
            fd.as_ref().map_or(Ok(()), check_eventfd)?;
            Ok::<_, Fault>(fd)
        };
        for (vring, state) in self.vrings.iter_mut().zip(vrings) {
            let addr = |(flags, desc, used, avail, log)| VringAddr {
                flags,
                desc,
                used,
                avail,
                log,
            };
            vring.size = state.size;
            vring.addr = state.addr.map(addr);
            vring.base = Some(state.base);
            vring.kick = event(state.kick)?;
            vring.call = event(state.call)?;
            vring.err = event(state.err)?;
            vring.enabled = state.enabled;
        }
        Ok(())
    }

    /// Stops the queues and releases the disk, so that another process may use both. Returns the
    /// positions of the queues.
    ///
    /// # Errors
    /// Closing the disk failed; not everything that was written may be visible to others.
    pub fn halt(&mut self) -> Result<Vec<u32>, String> {
        self.pause(0..self.vrings.len());
        let closed = self.try_to_deactivate();
        closed.map_err(|error| error.to_string())?;
        let bases = self.vrings.iter().map(|vring| self.base_of(vring));
        Ok(bases.collect())
    }

    /// Prepares the queues that are to run, and activates the disk if there are any. No other
    /// process may use them. The error is for the user.
    pub fn make_ready(&mut self, bases: Option<&[u32]>) -> Result<Ready, String> {
        for (vring, base) in self.vrings.iter_mut().zip(bases.unwrap_or_default()) {
            vring.base = Some(*base);
        }
        let ready = self.try_to_make_ready();
        ready.map_err(|(Fault::Refused(problem) | Fault::Fatal(problem))| problem)
    }

    fn try_to_make_ready(&mut self) -> Result<Ready, Fault> {
        let mut ready = Vec::new();
        for i in 0..self.vrings.len() {
            ready.extend(self.build(i)?.map(|queue| (i, queue)));
        }
        if !ready.is_empty() {
            self.activate()?;
        }
        Ok(Ready(ready))
    }

    /// Starts the prepared queues.
    pub fn run(&mut self, ready: Ready) -> Result<(), String> {
        let run = |(i, queue)| self.attach(i, queue);
        let ran = ready.0.into_iter().try_for_each(run);
        ran.map_err(|(Fault::Refused(problem) | Fault::Fatal(problem))| problem)
    }
}
