//! Events, for clients that subscribe to them.

use crate::repeats::message_of;
use fathom_trace::SlowRequest;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::broadcast::{Receiver, Sender, channel};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use utoipa::ToSchema;

/// Number of events buffered for a client; a slower client loses the oldest and gets a count.
const KEPT: usize = 1024;

/// Type of a connection to a disk: `vhost-user` for a virtual machine, `nbd` for an NBD client,
/// `fuse` for programs that have the disk's file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Connection of a virtual machine over vhost-user.
    VhostUser,
    /// Connection of an NBD client.
    Nbd,
    /// Programs that have the disk's file open.
    Fuse,
}

/// An event: one line of `/v1/events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Happened {
    /// The disk was added and is served.
    Added {
        /// Name of the disk.
        disk: String,
    },
    /// The disk was removed.
    Removed {
        /// Name of the disk.
        disk: String,
    },
    /// Options of the disk have changed, or the disk was frozen or thawed.
    Changed {
        /// Name of the disk.
        disk: String,
    },
    /// The disk has a new size.
    Resized {
        /// Name of the disk.
        disk: String,
        /// New size of the disk in bytes.
        size: u64,
    },
    /// The move of the disk from another server has a new `phase`:
    ///
    /// - `copying`: data is copied, and copied again when it changes.
    /// - `ready`: the guest can migrate.
    /// - `switching`: the disk has been taken over, and the guest waits until the rest is copied.
    /// - `arriving`: the disk has been taken over, and the guest runs here while the rest is
    ///   copied.
    /// - `done`: all data is here.
    Pulled {
        /// Name of the disk.
        disk: String,
        /// New phase of the move.
        phase: String,
    },
    /// A backup of the disk has begun.
    BackupBegun {
        /// Name of the disk.
        disk: String,
    },
    /// The backup of the disk has failed. Data that was read from it must not be used.
    BackupFailed {
        /// Name of the disk.
        disk: String,
        /// Why the backup has failed.
        problem: String,
    },
    /// The disk's mirror or commit has a new `phase`:
    ///
    /// - `copying`: data is copied, and copied again when it changes.
    /// - `ready`: the disk can be switched to the target.
    /// - `waiting`: the virtual machine has released the disk.
    /// - `done`: the mirror was ended, and the target is complete.
    /// - `failed`: the target is unusable because of `problem`.
    Mirrored {
        /// Name of the disk.
        disk: String,
        /// New phase of the mirror or commit.
        phase: String,
        /// Why the mirror or commit has failed. Null in phases other than `failed`.
        problem: Option<String>,
    },
    /// The disk's stream, or commit of images in the middle of the backing chain, has a new
    /// `phase`:
    ///
    /// - `copying`: data is copied.
    /// - `waiting`: the virtual machine has released the disk.
    /// - `done`: the job has copied all data.
    /// - `failed`: the job has failed because of `problem`.
    Streamed {
        /// Name of the disk.
        disk: String,
        /// New phase of the stream or commit.
        phase: String,
        /// Why the stream or commit has failed. Null in phases other than `failed`.
        problem: Option<String>,
    },
    /// A virtual machine or an NBD client has connected to the disk, or a program is the first to
    /// open its file.
    Attached {
        /// Name of the disk.
        disk: String,
        /// Type of the connection.
        by: By,
        /// Process or address of the client for display, such as `process 17` or `192.0.2.1:4000`.
        client: String,
    },
    /// A virtual machine or an NBD client has disconnected from the disk, or no program has its
    /// file open any more.
    Detached {
        /// Name of the disk.
        disk: String,
        /// Type of the connection.
        by: By,
        /// Process or address of the client for display, such as `process 17` or `192.0.2.1:4000`.
        client: String,
    },
    /// The alarm was raised because requests take too long.
    Alarm {
        /// Name of the disk.
        disk: String,
        /// Alarm that was raised, such as `p99=5ms`.
        alarm: String,
        /// Why the alarm was raised.
        text: String,
        /// Stage that took most of the time.
        stage: String,
        /// Examples of the slow requests, at most five.
        #[schema(value_type = Vec<Object>)]
        requests: Vec<SlowRequest>,
    },
    /// The alarm is no longer raised.
    AlarmOver {
        /// Name of the disk.
        disk: String,
        /// Alarm that is no longer raised, such as `p99=5ms`.
        alarm: String,
    },
    /// The process of a tenant has ended unexpectedly, and the server starts it again.
    Restarted {
        /// Name of the tenant.
        tenant: String,
    },
    /// The server has logged an error.
    Error {
        /// Message of the log line.
        text: String,
    },
    /// The server has read its configuration again.
    Reloaded,
    /// The client read too slowly, and missed events.
    Lost {
        /// Number of events that the client missed.
        count: u64,
    },
}

impl Happened {
    /// Returns the name of the disk that the event concerns.
    pub fn disk(&self) -> Option<&str> {
        match self {
            Happened::Added { disk }
            | Happened::Removed { disk }
            | Happened::Changed { disk }
            | Happened::Resized { disk, .. }
            | Happened::Pulled { disk, .. }
            | Happened::BackupBegun { disk }
            | Happened::BackupFailed { disk, .. }
            | Happened::Mirrored { disk, .. }
            | Happened::Streamed { disk, .. }
            | Happened::Attached { disk, .. }
            | Happened::Detached { disk, .. }
            | Happened::Alarm { disk, .. }
            | Happened::AlarmOver { disk, .. } => Some(disk),
            Happened::Restarted { .. }
            | Happened::Error { .. }
            | Happened::Reloaded
            | Happened::Lost { .. } => None,
        }
    }
}

/// An event with its time: one line of `/v1/events`.
#[derive(Serialize, ToSchema)]
pub struct Line {
    /// Time of the event, in milliseconds since 1970.
    time_ms: u64,
    #[serde(flatten)]
    happened: Happened,
}

impl Line {
    /// Creates the line of an event that happens now.
    pub fn of(happened: Happened) -> Line {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Line {
            time_ms: now.map_or(0, |now| now.as_millis() as u64),
            happened,
        }
    }

    /// Returns the event as a line with its line break.
    pub fn to_text(&self) -> String {
        let text = serde_json::to_string(self);
        text.map_or_else(|_| String::new(), |text| text + "\n")
    }
}

/// Sends events to all subscribers, and as a layer of the log also the errors that are logged.
///
/// Sending never waits for a subscriber.
#[derive(Clone, Debug)]
pub struct Events(Sender<Arc<str>>);

impl Default for Events {
    fn default() -> Events {
        Events(channel(KEPT).0)
    }
}

impl Events {
    /// Sends an event to all subscribers. Without subscribers, the event is discarded.
    pub fn tell(&self, happened: Happened) {
        if self.0.receiver_count() > 0 {
            // The subscribers may have left just now.
            let _ = self.0.send(Line::of(happened).to_text().into());
        }
    }

    /// Subscribes to all events from now on, as lines.
    pub fn listen(&self) -> Receiver<Arc<str>> {
        self.0.subscribe()
    }
}

impl<S: Subscriber> Layer<S> for Events {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR && self.0.receiver_count() > 0 {
            let text = message_of(event);
            self.tell(Happened::Error { text });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn lines_are_flat_objects() {
        let events = Events::default();
        let mut listener = events.listen();
        events.tell(Happened::Resized {
            disk: "a".into(),
            size: 512,
        });
        let line: serde_json::Value = serde_json::from_str(&listener.try_recv().unwrap()).unwrap();
        assert!(line["time_ms"].as_u64() > Some(1_700_000_000_000));
        assert_eq!(line["event"], "resized");
        assert_eq!((&line["disk"], &line["size"]), (&"a".into(), &512.into()));
    }

    #[test]
    fn errors_of_the_log_are_told() {
        let events = Events::default();
        let mut listener = events.listen();
        let log = tracing_subscriber::registry().with(events);
        tracing::subscriber::with_default(log, || {
            tracing::info!("nothing");
            tracing::error!("{} is lost", "all");
        });
        assert!(
            listener
                .try_recv()
                .unwrap()
                .contains(r#""text":"all is lost""#)
        );
        assert!(listener.try_recv().is_err());
    }
}
