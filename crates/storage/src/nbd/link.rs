//! Connections that fail, and new ones.

use super::channel::{NbdChannel, RECEIVE, SEND};
use super::shared::{Connected, Shared};
use fathom_core::{Cx, DiskError, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{Shutdown, shutdown};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// After an attempt to connect has failed, requests fail at once for so long.
const PAUSE: Duration = Duration::from_secs(1);

/// What there is of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Up,
    /// It has failed; the engine may still be using it.
    Closing,
    /// There is none; not before `retry_at` (ticks) is there to be one.
    Down {
        retry_at: u64,
    },
    /// Another thread is at it.
    Connecting,
}

/// An attempt to connect, by a thread that may block.
pub(super) struct Attempt {
    outcome: Mutex<Option<Result<Connected, DiskError>>>,
    ended: OwnedFd,
}

impl Attempt {
    pub(super) fn new() -> io::Result<Attempt> {
        Ok(Attempt {
            outcome: Mutex::default(),
            ended: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Signalled when it has ended.
    pub(super) fn fd(&self) -> RawFd {
        self.ended.as_raw_fd()
    }

    fn start(self: &Arc<Self>, shared: &Arc<Shared>) {
        let (attempt, to) = (self.clone(), shared.clone());
        shared.connector.ask(move || {
            attempt.put(to.connect_again());
            // An eventfd's counter cannot overflow by ones.
            let _ = rustix::io::write(&attempt.ended, &1u64.to_ne_bytes());
        });
    }

    fn put(&self, outcome: Result<Connected, DiskError>) {
        *self.outcome.lock().unwrap_or_else(|e| e.into_inner()) = Some(outcome);
    }

    fn take(&self) -> Option<Result<Connected, DiskError>> {
        self.outcome
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .take()
    }
}

impl NbdChannel {
    /// Use a new connection.
    pub(super) fn adopt(&mut self, cx: &mut Cx, connected: Connected) -> io::Result<()> {
        let (socket, allocation) = connected.into_parts();
        cx.engine.add_socket(socket.as_fd())?;
        let replies = self.shared.export.replies;
        self.line.receiver.reset(replies, allocation);
        self.line.sender.reset();
        self.socket = Some(socket);
        self.phase = Phase::Up;
        Ok(())
    }

    /// The connection is of no more use. Its requests fail as soon as the
    /// engine has let go of their memory.
    pub(super) fn lose(&mut self, cx: &mut Cx, why: &str) {
        let (uri, used) = (&self.shared.uri, self.line.table.used());
        match used {
            0 => tracing::warn!("{uri}: {why}"),
            1 => tracing::error!("{uri}: {why}; a request in flight has failed"),
            _ => tracing::error!("{uri}: {why}; requests in flight have failed"),
        }
        if self.shared.lost_connection() {
            tracing::error!(
                "{uri}: the server may have lost writes that were not flushed: all flushes fail \
                 from now on, until this disk is served anew"
            );
        }
        self.phase = Phase::Closing;
        if let Some(socket) = &self.socket {
            let _ = shutdown(socket.as_fd(), Shutdown::Both);
        }
        let line = &self.line;
        for (in_flight, tag) in [
            (line.receiver.in_flight, RECEIVE),
            (line.sender.in_flight, SEND),
        ] {
            if in_flight {
                cx.engine.cancel_socket(Token::channel(tag));
            }
        }
        self.settle(cx);
    }

    /// Once nothing is in flight: the end of a connection that has failed.
    pub(super) fn settle(&mut self, cx: &mut Cx) {
        if self.phase != Phase::Closing || self.line.is_in_use() {
            return;
        }
        if let Some(socket) = self.socket.take() {
            cx.engine.remove_socket(socket.as_fd());
        }
        self.line.sender.reset();
        self.phase = Phase::Down { retry_at: 0 };
        self.fail_asked(cx);
        self.give_up_on_leaving(cx);
        self.go_on(cx);
    }

    /// There is a request, and no connection.
    pub(super) fn reconnect(&mut self, cx: &mut Cx, retry_at: u64) {
        if cx.now() < retry_at {
            return self.fail_waiting(cx, |_, _, _| true);
        }
        self.phase = Phase::Connecting;
        self.attempt.start(&self.shared);
    }

    /// An attempt to connect has ended.
    pub(super) fn connected(&mut self, cx: &mut Cx) {
        let Some(outcome) = self.attempt.take() else {
            return;
        };
        let adopted = outcome.and_then(|connected| {
            let adopted = self.adopt(cx, connected);
            adopted.map_err(|source| DiskError::Io {
                path: self.shared.name(),
                what: "cannot be served",
                source,
            })
        });
        match adopted {
            Ok(()) => {
                tracing::info!("{}: connected again", self.shared.uri);
                self.go_on(cx);
            }
            Err(error) => self.failed_to_connect(cx, &error),
        }
    }

    fn failed_to_connect(&mut self, cx: &mut Cx, error: &DiskError) {
        tracing::error!("{error}");
        let retry_at = cx.now() + cx.clock().ticks(PAUSE);
        self.phase = Phase::Down { retry_at };
        self.fail_waiting(cx, |_, _, _| true);
    }

    /// Nobody who is leaving waits for a connection.
    pub(super) fn give_up_on_leaving(&mut self, cx: &mut Cx) {
        self.fail_waiting(cx, |cx, _, id| !cx.may_wait(id));
    }
}
