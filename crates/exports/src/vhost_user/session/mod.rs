//! State of one front-end's connection, and the handlers of its messages.
//!
//! Each concern has a file: `features`, `memory`, `vrings`, `log`, `inflight`, `config`,
//! `back_channel`, `status`, and `handover` to another process. A change that running queues depend
//! on is made while they are detached from their workers: see [`Session::while_paused`].

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

/// Reply to a request that succeeded.
#[derive(Debug)]
pub enum Reply {
    /// An acknowledgement, if the front-end asked for one.
    Ack,
    /// A reply with contents and possibly a file descriptor.
    Payload(Vec<u8>, Option<OwnedFd>),
}

impl Reply {
    fn u64(value: u64) -> Reply {
        Reply::Payload(value.to_ne_bytes().to_vec(), None)
    }
}

/// Why a request failed, in one line.
#[derive(Debug)]
pub enum Fault {
    /// The request was refused, and the session is unchanged. Without an acknowledgement, the
    /// connection must be closed, since nothing else tells the front-end.
    Refused(String),
    /// The connection must be closed.
    Fatal(String),
}

impl Fault {
    fn refused(problem: impl ToString) -> Fault {
        Fault::Refused(problem.to_string())
    }

    /// Marks the error as fatal, since the session has changed.
    fn into_fatal(self) -> Fault {
        match self {
            Fault::Refused(problem) | Fault::Fatal(problem) => Fault::Fatal(problem),
        }
    }
}

/// State of one connection. [`Session::end`] must be the last call.
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
    /// Creates a session with the front-end in process `pid`.
    pub fn new(shared: &'a Shared, pid: i32) -> io::Result<Session<'a>> {
        // A front-end that reconnects may not repeat what its guest has configured.
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

    /// Returns the alarm, which is raised when a mapping of this session becomes inaccessible.
    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Handles one message.
    pub fn handle(&mut self, frame: Frame) -> Result<Reply, Fault> {
        let number = frame.header.request;
        let request = Request::parse(frame).map_err(|e| Fault::Fatal(e.to_string()))?;
        tracing::debug!("vhost-user: {} {request:?}", name(number));
        match request {
            Request::GetFeatures => Ok(Reply::u64(self.offered_features())),
            Request::SetFeatures(features) => self.set_features(features),
            Request::GetProtocolFeatures => Ok(Reply::u64(features::PROTOCOL_FEATURES)),
            Request::SetProtocolFeatures(features) => self.set_protocol_features(features),
            // The connection stands for the ownership. RESET_OWNER is deprecated and must be
            // ignored.
            Request::SetOwner | Request::ResetOwner => Ok(Reply::Ack),
            Request::SetMemTable(regions) => self.set_mem_table(regions),
            Request::GetMaxMemSlots => Ok(Reply::u64(self.shared.share.slots() as u64)),
            Request::AddMemReg(region, fd) => self.add_mem_reg(region, fd),
            Request::RemMemReg(region) => self.rem_mem_reg(region),
            Request::SetLogBase { size, offset, fd } => self.set_log_base(size, offset, fd),
            // The eventfd would signal changes of the log; front-ends read the log when they want
            // to.
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

    /// Ends the session: drains the queues and releases the disk and the front-end's memory.
    pub fn end(&mut self) {
        self.stop_all();
        self.alarm.set_memory(None);
        self.memory = MemoryTable::default();
        self.log = None;
        self.inflight = None;
    }
}
