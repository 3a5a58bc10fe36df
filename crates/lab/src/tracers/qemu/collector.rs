//! Records QEMU's trace events for one round.

use std::path::{Path, PathBuf};

use fathom_run::qemu_names::{IO_URING_EVENTS, Successor, Version, WIKI_EVENTS};
use fathom_run::{Clock, StreamInfo};
use serde_json::{Value, json};

use super::{Converted, log, unusable};
use crate::error::{Error, Result};
use crate::machine::Aio;
use crate::tracers::Collected;

/// Name of the collector in a round's `traced`, and of its stream.
pub const NAME: &str = "qemu";

/// Sends a QMP command to QEMU and returns its reply.
pub type Qmp<'a> = dyn FnMut(&str, Value) -> Result<Value> + 'a;

/// Records QEMU's trace events through its log.
///
/// QEMU must be started with [`arguments`](Self::arguments). [`start`](Self::start) enables the
/// events and [`stop`](Self::stop) disables them, so QEMU's start-up is not traced.
#[derive(Clone, Debug)]
pub struct Collector {
    log: PathBuf,
    events: Vec<&'static str>,
}

/// Events beyond the wiki's: they distinguish requests and count completions.
const REQUESTS: &[&str] = &[
    "virtio_blk_handle_read",
    "virtio_blk_handle_write",
    "virtio_blk_req_complete",
];
const MUTEXES: &[&str] = &["qemu_mutex_lock", "qemu_mutex_locked", "qemu_mutex_unlock"];
/// The wiki's events on the path of each request.
const STEPS: &[&str] = &[
    "virtio_queue_notify",
    "virtqueue_pop",
    "virtio_blk_rw_complete",
    "virtio_notify",
];
const POOL_STEPS: &[&str] = &["paio_submit", "posix_aio_process_queue"];

impl Collector {
    /// Creates a collector for a QEMU of this version that writes its log to `log`. `mutexes` adds
    /// the events of every lock, which are a hundred times as many.
    ///
    /// # Errors
    /// When QEMU cannot write to a file of that name.
    pub fn new(log: &Path, version: Version, aio: Aio, mutexes: bool) -> Result<Collector> {
        check_name(log)?;
        let mut events = REQUESTS.to_vec();
        let wiki = WIKI_EVENTS.iter().map(|alias| (alias, false));
        for (alias, is_ring) in wiki.chain(IO_URING_EVENTS.iter().map(|alias| (alias, true))) {
            let wanted = match aio {
                _ if STEPS.contains(&alias.wiki) => true,
                Aio::Native => false,
                Aio::Threads => !is_ring && POOL_STEPS.contains(&alias.wiki),
                Aio::IoUring => is_ring,
            };
            if wanted && let Successor::Events(names) = alias.successor(version) {
                events.extend(names);
            }
        }
        if mutexes {
            events.extend(MUTEXES);
        }
        Ok(Collector {
            log: log.to_owned(),
            events,
        })
    }

    /// Creates a collector for the lock events alone. QEMU takes locks so often that these events
    /// make every step several times as long.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn locks(log: &Path) -> Result<Collector> {
        check_name(log)?;
        Ok(Collector {
            log: log.to_owned(),
            events: MUTEXES.to_vec(),
        })
    }

    /// Makes a running QEMU write to this log from now on.
    ///
    /// # Errors
    /// When QEMU does not reply or cannot write the log.
    pub fn switch_log(&self, qmp: &mut Qmp) -> Result<()> {
        let line = format!("logfile {}", self.log.display());
        let said = qmp("human-monitor-command", json!({ "command-line": line }))?;
        match said.as_str().unwrap_or_default().trim() {
            "" => Ok(()),
            said => Err(unusable(
                &self.log,
                format!("QEMU does not log there: {said}"),
            )),
        }
    }

    /// Returns the events to record.
    pub fn events(&self) -> &[&'static str] {
        &self.events
    }

    /// Returns the arguments for QEMU's command line, which do not enable any event.
    pub fn arguments(&self) -> Vec<String> {
        let log = self.log.to_string_lossy().into_owned();
        ["-msg", "timestamp=on", "-D", &log]
            .map(str::to_owned)
            .into()
    }

    /// Returns arguments that also enable the events from the start, for QEMU without QMP.
    pub fn arguments_traced(&self) -> Vec<String> {
        let traces = self.events.iter().flat_map(|event| ["-trace", event]);
        let mut arguments = self.arguments();
        arguments.extend(traces.map(str::to_owned));
        arguments
    }

    /// Enables the events. Returns a problem line for each event that this QEMU does not have.
    ///
    /// # Errors
    /// When QEMU does not reply, or has none of the events because it was built without tracing.
    pub fn start(&self, qmp: &mut Qmp) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        for event in &self.events {
            match set(qmp, event, true) {
                Ok(()) => {}
                Err(Error::Qmp { .. }) => missing.push(*event),
                Err(other) => return Err(other),
            }
        }
        if missing.len() == self.events.len() {
            return Err(Error::Missing {
                what: "QEMU's trace events".into(),
                hint: "this build has no trace backend; use one with the log backend, as \
                       distributions build it",
            });
        }
        let problem = |event| format!("QEMU has no trace event {event}; its step is missing");
        Ok(missing.into_iter().map(problem).collect())
    }

    /// Disables the events. The log stays.
    ///
    /// # Errors
    /// When QEMU does not reply.
    pub fn stop(&self, qmp: &mut Qmp) -> Result<()> {
        for event in &self.events {
            match set(qmp, event, false) {
                Ok(()) | Err(Error::Qmp { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// Converts the log to `qemu.events` in a round's folder.
    ///
    /// # Errors
    /// Those of [`log::convert`].
    pub fn collect(&self, round: &Path) -> Result<Collected> {
        let stream = round.join(format!("{NAME}.events"));
        let Converted {
            events,
            lost,
            problems,
        } = log::convert(&self.log, &stream)?;
        let info = StreamInfo {
            name: NAME.to_owned(),
            clock: Clock::HostRealtime,
            events,
            lost: Some(lost),
        };
        Ok(Collected {
            streams: vec![info],
            problems,
        })
    }
}

fn check_name(log: &Path) -> Result<()> {
    if log.to_str().is_none_or(|path| path.contains('%')) {
        let reason = "QEMU cannot have a '%' in its log's name; choose another folder";
        return Err(unusable(log, reason.into()));
    }
    Ok(())
}

fn set(qmp: &mut Qmp, event: &str, enable: bool) -> Result<()> {
    qmp(
        "trace-event-set-state",
        json!({ "name": event, "enable": enable }),
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(version: Version, aio: Aio) -> Vec<&'static str> {
        let collector = Collector::new(Path::new("/log"), version, aio, false);
        collector.unwrap().events
    }

    #[test]
    fn events_are_those_of_the_version_and_the_engine() {
        let of = |version, aio, name| events(version, aio).contains(&name);
        assert!(of((7, 2), Aio::Threads, "thread_pool_submit"));
        assert!(of((10, 0), Aio::Threads, "thread_pool_complete_aio"));
        assert!(!of((10, 0), Aio::Threads, "thread_pool_submit"));
        assert!(!of((10, 0), Aio::Threads, "luring_co_submit"));
        assert!(of((9, 0), Aio::IoUring, "luring_process_completion"));
        assert!(of((10, 2), Aio::IoUring, "luring_cqe_handler"));
        assert!(of((9, 0), Aio::Native, "virtio_notify_irqfd"));
        assert!(!of((10, 1), Aio::Native, "virtio_notify_irqfd"));
        assert!(!of((9, 0), Aio::Native, "thread_pool_submit"));
    }

    #[test]
    fn a_log_that_qemu_would_misread_is_refused() {
        let collector = Collector::new(Path::new("/a%d"), (9, 0), Aio::Native, false);
        assert!(collector.unwrap_err().to_string().contains("'%'"));
    }

    #[test]
    fn events_that_a_qemu_lacks_are_said() {
        let collector = Collector::new(Path::new("/log"), (9, 0), Aio::Threads, false).unwrap();
        let refuse = |command: &str| {
            Err(Error::Qmp {
                command: command.to_owned(),
                description: "unknown event".into(),
            })
        };
        let mut some = |command: &str, arguments: Value| match arguments["name"].as_str() {
            Some("virtqueue_pop") => refuse(command),
            _ => Ok(Value::Null),
        };
        let missing = collector.start(&mut some).unwrap();
        assert_eq!(missing.len(), 1);
        assert!(missing[0].contains("virtqueue_pop"));
        collector.stop(&mut some).unwrap();
        let mut none = |command: &str, _| refuse(command);
        let error = collector.start(&mut none).unwrap_err().to_string();
        assert!(error.contains("no trace backend"), "{error}");
    }
}
