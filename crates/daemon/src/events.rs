//! What happens, for whoever wants to hear of it.

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

/// Who has not taken in so many loses the oldest, and is told how many.
const KEPT: usize = 1024;

/// How a disk is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    VhostUser,
    Nbd,
}

/// Something has happened: one line of `/v1/events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Happened {
    /// A disk is served.
    Added { disk: String },
    /// It is served no more.
    Removed { disk: String },
    /// Options of it are others.
    Changed { disk: String },
    /// It has another size, in bytes.
    Resized { disk: String, size: u64 },
    /// It is on its way here from another server: `copying` (again), `ready` (its guest may come), `switching`,
    /// `arriving` (its guest is here already), `done`.
    Pulled { disk: String, phase: String },
    /// It is kept as it is, for a backup.
    BackupBegun { disk: String },
    /// It was not possible to keep it: what was read of it is not to be used.
    BackupFailed { disk: String, problem: String },
    /// It is copied to another one while it is used: `copying` (again), `ready` (to be switched over), `waiting` (for its
    /// virtual machine), `done`, or `failed`, by which problem.
    Mirrored {
        disk: String,
        phase: String,
        problem: Option<String>,
    },
    /// Its image makes its own what is below it: `copying`, `waiting` (for its virtual machine), `done`, or `failed`, by which
    /// problem.
    Streamed {
        disk: String,
        phase: String,
        problem: Option<String>,
    },
    /// Somebody uses it: a virtual machine (`vhost-user`) or an NBD client (`nbd`).
    Attached {
        disk: String,
        by: By,
        client: String,
    },
    /// Somebody does no more.
    Detached {
        disk: String,
        by: By,
        client: String,
    },
    /// Requests of it take too long: why, and the stage that is to blame with the slowest of them.
    Alarm {
        disk: String,
        alarm: String,
        text: String,
        stage: String,
        #[schema(value_type = Vec<Object>)]
        requests: Vec<SlowRequest>,
    },
    /// They do no more.
    AlarmOver { disk: String, alarm: String },
    /// The process of a tenant has ended by itself, and is started again.
    Restarted { tenant: String },
    /// An error, as the log tells it.
    Error { text: String },
    /// The configuration was read again.
    Reloaded,
    /// So many lines were not taken in in time.
    Lost { count: u64 },
}

impl Happened {
    /// The name of the disk to which it has.
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

/// One line.
#[derive(Serialize, ToSchema)]
pub struct Line {
    /// Milliseconds since 1970.
    time_ms: u64,
    #[serde(flatten)]
    happened: Happened,
}

impl Line {
    pub fn of(happened: Happened) -> Line {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Line {
            time_ms: now.map_or(0, |now| now.as_millis() as u64),
            happened,
        }
    }

    /// With its end.
    pub fn to_text(&self) -> String {
        let text = serde_json::to_string(self);
        text.map_or_else(|_| String::new(), |text| text + "\n")
    }
}

/// Tells all who listen; a layer of the log, too, of which it tells the errors. Nobody who has
/// something to tell waits for them.
#[derive(Clone, Debug)]
pub struct Events(Sender<Arc<str>>);

impl Default for Events {
    fn default() -> Events {
        Events(channel(KEPT).0)
    }
}

impl Events {
    pub fn tell(&self, happened: Happened) {
        if self.0.receiver_count() > 0 {
            // They may have gone just now.
            let _ = self.0.send(Line::of(happened).to_text().into());
        }
    }

    /// What happens from now on, line by line.
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
