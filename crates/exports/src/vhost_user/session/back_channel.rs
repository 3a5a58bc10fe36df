//! Requests from the back-end to the front-end.

use super::{Fault, Reply, Session};
use crate::vhost_user::codec::{CodecError, Header, Received, Receiver, send};
use fathom_units::cause;
use rustix::net::sockopt::socket_type;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const CONFIG_CHANGE: u32 = 2;

/// Socket for requests to the front-end. Replies are read when they arrive, without waiting: the
/// front-end reads the configuration before it replies, and this side must serve that.
pub struct BackChannel {
    socket: OwnedFd,
    receiver: Receiver,
}

impl BackChannel {
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the receiver, which holds any incomplete message.
    pub(super) fn receiver(&self) -> &Receiver {
        &self.receiver
    }

    /// Continues with the part of a message that another process has received.
    pub(super) fn resume(&mut self, receiver: Receiver) {
        self.receiver = receiver;
    }

    fn request(&self, number: u32, need_reply: bool) -> Result<(), CodecError> {
        send(
            &self.socket,
            Header::request(number, 0, need_reply),
            &[],
            None,
        )
    }

    /// Reads a reply. Returns false if the channel cannot be used any more.
    fn read(&mut self) -> bool {
        match self.receiver.receive(&self.socket) {
            Ok(Received::Incomplete) => true,
            Ok(Received::Closed) => false,
            Ok(Received::Frame(frame)) => {
                if !frame.header.is_reply() || frame.payload != 0u64.to_ne_bytes() {
                    tracing::warn!(
                        "vhost-user: the front-end rejected the changed configuration, so the \
                         guest may not see the disk's new size"
                    );
                }
                true
            }
            Err(error) => {
                tracing::warn!(
                    "vhost-user: back channel failed, so the guest may not see changes of the \
                     disk's size: {}",
                    cause(error)
                );
                false
            }
        }
    }
}

impl Session<'_> {
    pub(super) fn set_backend_req_fd(&mut self, socket: OwnedFd) -> Result<Reply, Fault> {
        // Polling another kind of file may wait for its file system.
        socket_type(&socket).map_err(|e| Fault::Refused(format!("not a socket: {}", cause(e))))?;
        self.back_channel = Some(BackChannel {
            socket,
            receiver: Receiver::default(),
        });
        Ok(Reply::Ack)
    }

    /// Tells the front-end to read the configuration again.
    pub fn config_changed(&mut self) {
        let (config, need_reply) = (self.features.config(), self.features.reply_ack());
        let Some(channel) = self.back_channel.as_ref().filter(|_| config) else {
            tracing::warn!(
                "vhost-user: the front-end has no back channel, so the guest does not see the \
                 disk's new size until it reads the configuration again"
            );
            return;
        };
        if let Err(error) = channel.request(CONFIG_CHANGE, need_reply) {
            tracing::warn!(
                "vhost-user: back channel failed, so the guest may not see changes of the disk's \
                 size: {}",
                cause(error)
            );
            self.back_channel = None;
        }
    }

    pub fn read_back_channel(&mut self) {
        if self
            .back_channel
            .as_mut()
            .is_some_and(|channel| !channel.read())
        {
            self.back_channel = None;
        }
    }
}
