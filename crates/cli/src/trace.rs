//! `fathom trace`: prints traces, and turns tracing on and off.

use crate::servers::find;
use crate::target::Disk;
use anyhow::bail;
use clap::{ArgGroup, Args};
use fathom_trace::ring::{Entry, Header, RingReader, Wire};
use serde_json::{Value, json};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Print a request trace, or turn tracing on and off
///
/// A server writes a trace if it was started with --trace, or after
/// `fathom trace --disk NAME --on FILE`. The trace keeps the last 32768 requests of each thread.
/// --follow prints requests as they complete.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("traced").args(["disk", "server"]).multiple(true)))]
pub struct TraceArgs {
    /// Trace file to print
    #[arg(
        value_name = "FILE",
        required_unless_present = "traced",
        conflicts_with = "traced"
    )]
    file: Option<PathBuf>,

    /// Print JSON, one object per line
    #[arg(long, conflicts_with = "traced")]
    json: bool,

    /// Print new requests until the server stops the trace
    #[arg(long, conflicts_with = "traced")]
    follow: bool,

    /// Disk whose tracing is turned on or off [default: the only disk of the server]
    #[arg(long, value_name = "NAME", requires = "switch")]
    disk: Option<String>,

    /// Process id or API socket of the disk's server [default: the server that has the disk]
    #[arg(long, alias = "pid", value_name = "PID|SOCKET", requires = "switch")]
    server: Option<String>,

    /// Start tracing to this file, such as /dev/shm/vm1.trace
    #[arg(long, value_name = "FILE", group = "switch", requires = "traced")]
    on: Option<PathBuf>,

    /// Stop tracing
    #[arg(long, group = "switch", requires = "traced")]
    off: bool,
}

/// Time to wait between two reads of new records.
const PAUSE: Duration = Duration::from_millis(20);

pub fn run(args: TraceArgs) -> anyhow::Result<()> {
    match &args.file {
        Some(file) => print(RingReader::open(file)?, args.json, args.follow),
        None => switch(&args),
    }
}

/// Returns the disk that the arguments select.
fn disk_of(args: &TraceArgs) -> anyhow::Result<Disk> {
    let (server, named) = match (&args.server, &args.disk) {
        (Some(server), disk) => {
            let (server, named) = find(server)?;
            (server, disk.clone().or(named))
        }
        (None, Some(disk)) => find(disk)?,
        (None, None) => bail!("--disk or --server is needed"),
    };
    Disk::new(server, named)
}

/// Turns tracing of a disk on or off.
fn switch(args: &TraceArgs) -> anyhow::Result<()> {
    // The server may have another working directory.
    let file = args.on.as_ref().map(std::path::absolute).transpose()?;
    let disk = disk_of(args)?;
    let place = disk.below("trace");
    match file {
        Some(file) => {
            let started = disk.server.put(&place).json(&json!({ "file": file }));
            started.send::<Value>().map(drop)?;
        }
        None => disk.server.delete(&place).send()?,
    }
    Ok(())
}

fn print(mut reader: RingReader, json: bool, follow: bool) -> anyhow::Result<()> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut entries = Vec::new();
    let mut lost = 0;
    if !json {
        writeln!(out, "{HEAD}")?;
    }
    loop {
        let live = reader.is_live();
        entries.clear();
        reader.poll(&mut entries)?;
        // The records of each ring are in order. This merges all rings by the end of the requests.
        entries.sort_by_key(|entry| entry.record.stamps.last().copied());
        if reader.lost() > lost {
            report_loss(&mut out, reader.lost() - lost, json)?;
            lost = reader.lost();
        }
        for entry in &entries {
            if json {
                writeln!(out, "{}", to_json(reader.header(), entry))?;
            } else {
                print_line(&mut out, reader.header(), entry)?;
            }
        }
        out.flush()?;
        if !follow || !live {
            return Ok(());
        }
        if entries.is_empty() {
            std::thread::sleep(PAUSE);
        }
    }
}

fn report_loss(out: &mut impl Write, lost: u64, json: bool) -> std::io::Result<()> {
    if json {
        writeln!(out, "{}", json!({ "lost": lost }))
    } else {
        writeln!(
            out,
            "({lost} requests were overwritten before they could be read)"
        )
    }
}

const STAGES: [&str; 7] = [
    "wake", "queue", "map", "device", "finish", "notify", "total",
];

const HEAD: &str = "time (UTC)       operation    queue         offset       len      \
                    wake     queue       map    device    finish    notify     total (us) \
                    by     status";

/// Returns the time in each stage and the total, in nanoseconds.
fn times(header: &Header, entry: &Entry) -> [f64; 7] {
    let stamps = &entry.record.stamps;
    let mut times = [0.0; 7];
    for (time, pair) in times.iter_mut().zip(stamps.windows(2)) {
        *time = header.ns(pair[1].saturating_sub(pair[0]));
    }
    times[6] = header.ns(stamps[6].saturating_sub(stamps[0]));
    times
}

fn print_line(out: &mut impl Write, header: &Header, entry: &Entry) -> std::io::Result<()> {
    let record = &entry.record;
    let time = clock_time(header.realtime(record.stamps[0]));
    write!(
        out,
        "{time}  {:<12} {:>5} {:>14} {:>9}",
        record.op.name(),
        record.queue,
        record.offset,
        record.len
    )?;
    for ns in times(header, entry) {
        write!(out, " {:>9.2}", ns / 1000.0)?;
    }
    let by = if record.polled { "poll" } else { "kick" };
    match record.error {
        0 => writeln!(out, "      {by}   ok"),
        errno => writeln!(
            out,
            "      {by}   {}",
            fathom_units::cause(std::io::Error::from_raw_os_error(errno))
        ),
    }
}

/// Formats a time as hours, minutes, seconds and microseconds of the day in UTC.
fn clock_time(ns_since_epoch: u64) -> String {
    let us = ns_since_epoch / 1000;
    let seconds = us / 1_000_000;
    format!(
        "{:02}:{:02}:{:02}.{:06}",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
        us % 1_000_000
    )
}

fn to_json(header: &Header, entry: &Entry) -> Value {
    let record = &entry.record;
    let times = STAGES.into_iter().zip(times(header, entry));
    let stages: serde_json::Map<_, _> = times.map(|(s, t)| (format!("{s}_ns"), json!(t))).collect();
    json!({
        "time_ns": header.realtime(record.stamps[0]),
        "monotonic_ns": header.monotonic(record.stamps[0]),
        "disk": header.disk,
        "worker": entry.ring,
        "queue": record.queue,
        "op": record.op.name(),
        "offset": record.offset,
        "len": record.len,
        "stages": stages,
        "stamps": record.stamps,
        "polled": record.polled,
        "errno": record.error,
        "wire": wire_json(record.wire),
    })
}

/// Converts the request's NBD cookie on the network to JSON.
///
/// Cookies are strings, because JSON's numbers cannot represent all of them.
fn wire_json(wire: Wire) -> Value {
    let cookie = |cookie: u64| format!("{cookie:016x}");
    match wire {
        Wire::None => Value::Null,
        Wire::Came(with) => json!({ "came": cookie(with) }),
        Wire::Went(with) => json!({ "went": cookie(with) }),
        Wire::Several => json!("several"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_are_in_utc() {
        assert_eq!(clock_time(0), "00:00:00.000000");
        assert_eq!(
            clock_time((86_400 + 3_723) * 1_000_000_000 + 4_999),
            "01:02:03.000004"
        );
    }
}
