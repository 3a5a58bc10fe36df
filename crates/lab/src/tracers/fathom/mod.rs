//! Records Fathom's own trace: every request of a running `fathom serve`, with a timestamp per
//! stage.

mod api;
mod convert;

use fathom_units::cause;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_run::{Clock, Event, Kind, Pair, StreamInfo, StreamWriter};
use fathom_trace::RingReader;

use super::ftrace::unwritten;
use super::scene::Scene;
use super::{Collected, Collector, boxed, pair};
use crate::error::{Context, Error, Result};
use crate::scratch::Scratch;

pub use api::{Api, Info};

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "fathom";

/// Interval between two reads of the ring. A worker at a million requests per second fills its
/// 32768 records in 32 ms.
const PAUSE: Duration = Duration::from_millis(5);
/// Folder of the trace ring. The folder is in memory, so writes to the ring do not disturb the
/// measured disk.
const SCRATCH: &str = "/dev/shm";

/// A running recording of a server's trace.
#[derive(Debug)]
pub struct Fathom {
    api: Api,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Drained>>>,
    /// Whether the trace was off before the recording and must be switched off again.
    switch_off: bool,
    problems: Vec<String>,
    kept: Option<(Pair, Pair)>,
    // Dropped last, when the ring is no longer in use.
    _scratch: Option<Scratch>,
}

/// Result of the drain thread.
#[derive(Debug)]
struct Drained {
    events: Vec<Event>,
    lost: u64,
    clock: Clock,
}

/// Records the trace of the scene's server, if it has timestamps of its own.
pub(super) fn in_scene(scene: &Scene) -> Option<Result<Box<dyn Collector>>> {
    let api = Api::connect(scene.api?);
    Some(boxed(api.and_then(start)))
}

/// Starts to drain this disk's trace. If tracing was off, it is on only during the recording.
///
/// # Errors
/// When the server does not respond, or cannot trace.
pub fn start(api: Api) -> Result<Fathom> {
    let info = api.info()?;
    let (file, scratch) = match &info.trace {
        Some(file) => (file.clone(), None),
        None => {
            let scratch = scratch_for(info.pid)?;
            let file = scratch.path().join("ring");
            api.trace(Some(&file))?;
            (file, Some(scratch))
        }
    };
    let switch_off = scratch.is_some();
    let stop = Arc::new(AtomicBool::new(false));
    let drained = open(&file).and_then(|ring| drain(ring, info.pid, Arc::clone(&stop)));
    match drained {
        Ok(thread) => Ok(Fathom {
            api,
            stop,
            thread: Some(thread),
            switch_off,
            problems: Vec::new(),
            kept: None,
            _scratch: scratch,
        }),
        Err(error) => {
            if switch_off {
                let _ = api.trace(None);
            }
            Err(error)
        }
    }
}

/// Creates a folder that belongs to the server's user, so that the server can write to it.
fn scratch_for(pid: u32) -> Result<Scratch> {
    use std::os::unix::fs::MetadataExt;
    let what = || "cannot make a folder for Fathom's trace".to_owned();
    let dir = Scratch::within(Path::new(SCRATCH)).or_else(|_| Scratch::small())?;
    if let Ok(process) = std::fs::metadata(format!("/proc/{pid}")) {
        let owner = (Some(process.uid()), Some(process.gid()));
        std::os::unix::fs::chown(dir.path(), owner.0, owner.1).context(what)?;
    }
    Ok(dir)
}

fn open(file: &Path) -> Result<RingReader> {
    RingReader::open(file).map_err(|error| Error::Protocol(error.to_string()))
}

fn drain(
    mut ring: RingReader,
    pid: u32,
    stop: Arc<AtomicBool>,
) -> Result<JoinHandle<Result<Drained>>> {
    let is_tsc = ring.header().tsc;
    let now = pair();
    let since = if is_tsc { now.tsc } else { now.monotonic_ns };
    let workers = convert::workers(pid);
    let body = move || {
        let (mut entries, mut events) = (Vec::new(), Vec::new());
        // Records that were overwritten before the recording started do not count as lost.
        let (mut lost, mut is_first) = (0, true);
        loop {
            let last = stop.load(Ordering::Acquire);
            entries.clear();
            let before = ring.lost();
            ring.poll(&mut entries)
                .map_err(|error| Error::Protocol(error.to_string()))?;
            let missed = ring.lost() - before;
            if missed > 0 && !is_first {
                lost += missed;
                let time = entries.iter().map(|one| one.record.stamps[0]).min();
                let time = time.unwrap_or(since).max(since);
                events.push(Event::new(time, Kind::Lost, 0, 0, &[missed]));
            }
            is_first = false;
            let ours = entries.iter().filter(|one| one.record.stamps[6] >= since);
            events.extend(ours.map(|one| convert::event(one, &workers)));
            if last {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        let clock = if is_tsc {
            Clock::HostTsc
        } else {
            Clock::HostMonotonic
        };
        Ok(Drained {
            events,
            lost,
            clock,
        })
    };
    std::thread::Builder::new()
        .name("fathom drain".into())
        .spawn(body)
        .context(|| "cannot start a thread".into())
}

impl Fathom {
    fn end(&mut self) -> Result<()> {
        if std::mem::take(&mut self.switch_off) {
            self.api.trace(None)?;
        }
        Ok(())
    }
}

impl Collector for Fathom {
    fn name(&self) -> &'static str {
        NAME
    }

    fn halt(&mut self) -> Result<()> {
        let ended = self.end();
        self.stop.store(true, Ordering::Release);
        ended
    }

    fn keep(&mut self, since: Pair, until: Pair) {
        self.kept = Some((since, until));
    }

    fn stop(mut self: Box<Self>, round: &Path) -> Result<Collected> {
        if let Err(error) = self.halt() {
            self.problems.push(format!("{NAME}: {}", cause(error)));
        }
        let thread = self.thread.take().expect("only stopped once");
        let mut drained = thread
            .join()
            .unwrap_or_else(|_| Err(Error::Protocol("the reader of the ring failed".into())))?;
        if let Some((since, until)) = self.kept {
            let kept = match drained.clock {
                Clock::HostTsc => since.tsc..=until.tsc,
                _ => since.monotonic_ns..=until.monotonic_ns,
            };
            drained.events.retain(|event| kept.contains(&event.time));
        }
        let events = write(drained.events, &round.join(format!("{NAME}.events")))?;
        let stream = StreamInfo {
            name: NAME.into(),
            clock: drained.clock,
            events,
            lost: Some(drained.lost),
        };
        Ok(Collected {
            streams: vec![stream],
            problems: std::mem::take(&mut self.problems),
        })
    }
}

/// Writes the events in order of their start. The ring has the requests in order of completion.
fn write(mut events: Vec<Event>, path: &Path) -> Result<u64> {
    events.sort_by_key(|event| event.time);
    let mut writer =
        StreamWriter::create(path, fathom_run::MAX_ARGS, Vec::new()).map_err(unwritten)?;
    for event in &events {
        writer.push(event).map_err(unwritten)?;
    }
    writer.finish().map_err(unwritten)
}

impl Drop for Fathom {
    fn drop(&mut self) {
        let _ = self.end();
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
