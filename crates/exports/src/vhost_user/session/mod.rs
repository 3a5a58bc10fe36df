//! What one front-end has set up, and what its messages do to it.
//!
//! Each concern has a file: `features`, `memory`, `vrings`, `log`,
//! `inflight`, `config` (and the back channel), `status`, and `handover` to another process. A change that
//! running queues depend on is made while they are detached from their
//! workers: [`Session::while_paused`].

mod back_channel;
mod config;
mod features;
mod handover;
mod inflight;
mod log;
mod memory;
mod status;
mod vrings;

use super::Shared;
use super::alarm::Alarm;
use super::codec::{Frame, Request, name};
use back_channel::BackChannel;
use features::Features;
pub use handover::{SessionState, UnfinishedState};
use inflight::InflightArea;
use log::LogArea;
use memory::MemoryTable;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vrings::Vring;

/// How a request that was carried out is answered.
#[derive(Debug)]
pub enum Reply {
    /// With an acknowledgement, if the front-end asked for one.
    Ack,
    /// With contents of its own.
    Payload(Vec<u8>, Option<OwnedFd>),
}

impl Reply {
    fn u64(value: u64) -> Reply {
        Reply::Payload(value.to_ne_bytes().to_vec(), None)
    }
}

/// Why a request was not carried out, in one line.
#[derive(Debug)]
pub enum Fault {
    /// The session is as before. Without an acknowledgement to carry the
    /// refusal, only closing tells the front-end.
    Refused(String),
    /// The connection must close.
    Fatal(String),
}

impl Fault {
    fn refused(problem: impl ToString) -> Fault {
        Fault::Refused(problem.to_string())
    }

    /// The session is not as before.
    fn into_fatal(self) -> Fault {
        match self {
            Fault::Refused(problem) | Fault::Fatal(problem) => Fault::Fatal(problem),
        }
    }
}

/// One connection's state. [`Session::end`] must be the last call.
pub struct Session<'a> {
    shared: &'a Shared,
    alarm: Arc<Alarm>,
    features: Features,
    memory: MemoryTable,
    log: Option<LogArea>,
    inflight: Option<InflightArea>,
    vrings: Vec<Vring>,
    back_channel: Option<BackChannel>,
    device_status: u8,
    /// The disk is activated.
    active: bool,
}

impl<'a> Session<'a> {
    /// A session with the front-end in process `pid`.
    pub fn new(shared: &'a Shared, pid: i32) -> io::Result<Session<'a>> {
        // A front-end that comes again may not tell what its guest has set.
        if shared.last_pid.swap(pid, Ordering::Relaxed) != pid {
            shared.device.reset();
        }
        Ok(Session {
            shared,
            alarm: Arc::new(Alarm::new()?),
            features: Features::default(),
            memory: MemoryTable::default(),
            log: None,
            inflight: None,
            vrings: (0..shared.max_queues).map(|_| Vring::default()).collect(),
            back_channel: None,
            device_status: 0,
            active: false,
        })
    }

    /// Raised when a mapping of this session has become worthless.
    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Carry out one message.
    pub fn handle(&mut self, frame: Frame) -> Result<Reply, Fault> {
        let number = frame.header.request;
        let request = Request::parse(frame).map_err(|e| Fault::Fatal(e.to_string()))?;
        tracing::debug!("vhost-user: {} {request:?}", name(number));
        match request {
            Request::GetFeatures => Ok(Reply::u64(self.offered_features())),
            Request::SetFeatures(features) => self.set_features(features),
            Request::GetProtocolFeatures => Ok(Reply::u64(features::PROTOCOL_FEATURES)),
            Request::SetProtocolFeatures(features) => self.set_protocol_features(features),
            // Ownership is the connection. RESET_OWNER is deprecated and to
            // be ignored.
            Request::SetOwner | Request::ResetOwner => Ok(Reply::Ack),
            Request::SetMemTable(regions) => self.set_mem_table(regions),
            Request::GetMaxMemSlots => Ok(Reply::u64(self.shared.share.slots() as u64)),
            Request::AddMemReg(region, fd) => self.add_mem_reg(region, fd),
            Request::RemMemReg(region) => self.rem_mem_reg(region),
            Request::SetLogBase { size, offset, fd } => self.set_log_base(size, offset, fd),
            // To be signalled when the log changes; front-ends look at the
            // log when they want to.
            Request::SetLogFd => Ok(Reply::Ack),
            Request::GetQueueNum => Ok(Reply::u64(self.vrings.len() as u64)),
            Request::SetVringNum { index, num } => self.set_vring_num(index, num),
            Request::SetVringAddr { index, addr } => self.set_vring_addr(index, addr),
            Request::SetVringBase { index, base } => self.set_vring_base(index, base),
            Request::GetVringBase { index } => self.get_vring_base(index),
            Request::SetVringKick { index, fd } => self.set_vring_kick(index, fd),
            Request::SetVringCall { index, fd } => self.set_vring_call(index, fd),
            Request::SetVringErr { index, fd } => self.set_vring_err(index, fd),
            Request::SetVringEnable { index, enable } => self.set_vring_enable(index, enable),
            Request::GetConfig(range) => Ok(self.get_config(range)),
            Request::SetConfig { range, data } => self.set_config(range, &data),
            Request::GetInflightFd(wanted) => self.get_inflight_fd(wanted),
            Request::SetInflightFd(area, fd) => self.set_inflight_fd(area, fd),
            Request::SetBackendReqFd(fd) => self.set_backend_req_fd(fd),
            Request::ResetDevice => self.reset_device(),
            Request::SetStatus(status) => self.set_status(status),
            Request::GetStatus => Ok(Reply::u64(self.device_status.into())),
            Request::Unknown(number) => {
                Err(Fault::Refused(format!("request {number} is not supported")))
            }
        }
    }

    pub fn back_channel(&self) -> Option<BorrowedFd<'_>> {
        self.back_channel.as_ref().map(BackChannel::fd)
    }

    /// The connection is over: drain everything and let go of the disk and
    /// of the front-end's memory.
    pub fn end(&mut self) {
        self.stop_all();
        self.alarm.set_memory(None);
        self.memory = MemoryTable::default();
        self.log = None;
        self.inflight = None;
    }
}
