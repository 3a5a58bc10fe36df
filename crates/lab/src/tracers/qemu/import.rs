//! Imports a trace that any QEMU wrote, as a run directory of its own.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::UNIX_EPOCH;

use fathom_run::{Clock, Environment, Round, Run, RunKind, StreamInfo};

use super::collector::NAME;
use super::schema::Schema;
use super::{Converted, log, simple, unusable};
use crate::error::{Context, Result};

/// Number of bytes that suffice to recognise a log.
const BEGINNING: u64 = 4096;

/// The trace backend that wrote a file, as its first bytes show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Log,
    Simple,
}

/// Creates the run directory `output` from a QEMU trace. The file's first bytes identify the
/// backend. `events` is that build's trace-events-all, which only files of the simple backend need.
///
/// # Errors
/// When the file is not such a trace, cannot be read or does not match the trace events. When
/// `output` already contains a run or cannot be written. A truncated trace or a trace with missing
/// events is not an error: the run contains the events that could be read, and its problems.
pub fn import(trace: &Path, events: Option<&Path>, output: &Path) -> Result<Run> {
    let backend = recognise(trace)?;
    let schema = match backend {
        Backend::Log => None,
        Backend::Simple => Some(schema(trace, events)?),
    };
    if output.join("run.json").exists() {
        return Err(unusable(
            output,
            "already contains a run; choose a new directory".into(),
        ));
    }
    let is_new = !output.exists();
    let done = write(trace, schema.as_ref(), output);
    if done.is_err() && is_new {
        // The trace is unusable, so a partial run directory is of no use.
        let _ = fs::remove_dir_all(output);
    }
    done
}

fn write(trace: &Path, schema: Option<&Schema>, output: &Path) -> Result<Run> {
    let folder = output.join(NAME);
    fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
    let stream = folder.join(format!("{NAME}.events"));
    let (converted, clock, backend) = match schema {
        None => (log::convert(trace, &stream)?, Clock::HostRealtime, "log"),
        Some(schema) => {
            let converted = simple::convert(trace, schema, &stream)?;
            (converted, Clock::HostMonotonic, "simple")
        }
    };
    let run = describe(trace, backend, clock, converted)?;
    run.save(output)?;
    Ok(run)
}

/// Recognises the backend by the first bytes. A file of the simple backend begins with eight bytes
/// of ones, the same in both byte orders. A log is text.
fn recognise(trace: &Path) -> Result<Backend> {
    let context = || format!("cannot read {}", trace.display());
    let file = File::open(trace).context(context)?;
    let mut bytes = Vec::new();
    file.take(BEGINNING)
        .read_to_end(&mut bytes)
        .context(context)?;
    let is_text = match std::str::from_utf8(&bytes) {
        Ok(text) => !text.contains('\0'),
        // A character may be cut at the end of the bytes that were read.
        Err(error) => error.error_len().is_none() && !bytes.contains(&0),
    };
    if bytes.starts_with(&[0xff; 8]) {
        Ok(Backend::Simple)
    } else if bytes.is_empty() {
        Err(unusable(
            trace,
            "empty; enable trace events (qemu-system-x86_64 -trace help)".into(),
        ))
    } else if is_text {
        Ok(Backend::Log)
    } else {
        Err(unusable(
            trace,
            "not a trace of QEMU: neither a log nor a file of the simple backend".into(),
        ))
    }
}

fn schema(trace: &Path, events: Option<&Path>) -> Result<Schema> {
    let Some(events) = events else {
        return Err(unusable(
            trace,
            "a trace of QEMU's simple backend; name that build's trace-events-all with \
             --qemu-events (QEMU installs it as share/qemu/trace-events-all)"
                .into(),
        ));
    };
    Schema::load(events)
}

fn describe(trace: &Path, backend: &str, clock: Clock, converted: Converted) -> Result<Run> {
    let Converted {
        events,
        lost,
        mut problems,
    } = converted;
    if backend == "simple" {
        problems.push(
            "a file of the simple backend names no threads: what several I/O threads did at one \
             time cannot be separated, and waits for locks are left out"
                .into(),
        );
    }
    let name = trace.file_name().unwrap_or(trace.as_os_str());
    let stream = StreamInfo {
        name: NAME.into(),
        clock,
        events,
        lost: Some(lost),
    };
    let title = format!("QEMU's own trace {} ({backend})", name.to_string_lossy());
    Ok(Run {
        created: written(trace)?,
        environment: Environment {
            fathom: env!("CARGO_PKG_VERSION").into(),
            ..Environment::default()
        },
        rounds: vec![Round {
            name: NAME.into(),
            traced: vec![NAME.into()],
            streams: vec![stream],
            ..Round::default()
        }],
        problems,
        ..Run::new(RunKind::Qemu, title)
    })
}

/// Returns when the trace was last written, in seconds since 1970.
fn written(trace: &Path) -> Result<u64> {
    let time = fs::metadata(trace).and_then(|data| data.modified());
    let time = time.context(|| format!("cannot read {}", trace.display()))?;
    let since = time.duration_since(UNIX_EPOCH);
    Ok(since.map_or(0, |since| since.as_secs()))
}
