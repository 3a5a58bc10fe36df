//! A sequential O_DIRECT read in the guest, one request at a time: the experiment that shows the
//! cost of every layer, because nothing overlaps.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::image::fill;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::host::{self, Accelerator};
use crate::machine::{Disk, Machine};
use crate::scratch::{self, Scratch};
use crate::server::Server;

/// Who serves the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// `fathom serve`, with the path of the program.
    Fathom(PathBuf),
    /// qemu-storage-daemon.
    QemuStorageDaemon,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Who serves the disk.
    pub peer: Peer,
    /// An image to read; a new one of `size` bytes is made when not given.
    pub image: Option<PathBuf>,
    /// Bytes of the new image.
    pub size: u64,
    /// How long the guest reads.
    pub runtime: Duration,
    /// More arguments for `fathom serve`.
    pub serve_args: Vec<String>,
}

/// What the guest measured; times in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestReport {
    /// Requests in a second.
    pub iops: f64,
    /// Requests in all.
    pub count: u64,
    /// Mean latency.
    pub mean_ns: f64,
    /// (percent, latency) in rising order.
    pub percentiles: Vec<(f64, u64)>,
    /// The slowest request.
    pub max_ns: u64,
}

/// The outcome of a run.
#[derive(Debug, Clone)]
pub struct Report {
    /// How the guest's instructions were run.
    pub accelerator: Accelerator,
    /// What the guest saw.
    pub guest: GuestReport,
    /// What the server printed at its end; empty for a peer.
    pub server: String,
}

/// Boots a guest, reads, and collects both sides' figures. `progress` is told of every step.
///
/// # Errors
/// Everything that can go wrong with images, servers and guests, with their last words.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    scratch::sweep();
    let dir = Scratch::on_disk()?;
    let image = match &options.image {
        Some(path) => path.clone(),
        None => {
            progress(&format!("writing an image of {} MiB", options.size >> 20));
            let path = dir.path().join("disk.img");
            fill(&path, options.size)?;
            path
        }
    };
    let server = start_server(options, dir.path(), &image)?;
    let accelerator = Accelerator::detect();
    progress(&format!("booting a guest ({})", accelerator.name()));
    let machine = Machine {
        disks: vec![Disk::vhost_user("disk", server.socket())],
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine)?;
    progress(&format!(
        "reading 4k blocks in the guest for {} s",
        options.runtime.as_secs()
    ));
    let measured = read(&mut guest, options.runtime)?;
    progress("powering the guest off");
    guest.power_off()?;
    Ok(Report {
        accelerator,
        guest: measured,
        server: server.stop()?,
    })
}

fn start_server(options: &Options, dir: &Path, image: &Path) -> Result<Server> {
    match &options.peer {
        Peer::QemuStorageDaemon => Server::qemu_storage_daemon(dir, "disk", image, 1),
        Peer::Fathom(binary) => {
            let args: Vec<&str> = options.serve_args.iter().map(String::as_str).collect();
            Server::fathom(binary, dir, "disk", &image.to_string_lossy(), &args)
        }
    }
}

fn read(guest: &mut Guest, runtime: Duration) -> Result<GuestReport> {
    let device = guest.device("disk")?;
    let seconds = runtime.as_secs().max(1);
    let script = format!(
        "fio --name=seqread --filename={device} --readonly --rw=read --bs=4k --direct=1 \
         --ioengine=psync --time_based --runtime={seconds} --output-format=json \
         --output=/tmp/fio.json >/tmp/fio.log 2>&1 || {{ cat /tmp/fio.log; exit 1; }}\n\
         cat /tmp/fio.json"
    );
    let text = guest.check(&script, runtime + Duration::from_secs(120))?;
    parse_fio(&text).ok_or_else(|| Error::Protocol(format!("not fio's report: {text}")))
}

/// Reads the first job's figures from fio's JSON (fio may print warnings before it).
fn parse_fio(text: &str) -> Option<GuestReport> {
    let report: Value = serde_json::from_str(text.get(text.find('{')?..)?).ok()?;
    let read = &report["jobs"][0]["read"];
    let latency = &read["clat_ns"];
    let mut percentiles: Vec<(f64, u64)> = latency["percentile"]
        .as_object()?
        .iter()
        .filter_map(|(percent, ns)| Some((percent.parse().ok()?, ns.as_u64()?)))
        .filter(|(percent, _)| SHOWN.contains(percent))
        .collect();
    percentiles.sort_by(|a, b| a.0.total_cmp(&b.0));
    Some(GuestReport {
        iops: read["iops"].as_f64()?,
        count: read["total_ios"].as_u64()?,
        mean_ns: latency["mean"].as_f64()?,
        percentiles,
        max_ns: latency["max"].as_u64()?,
    })
}

const SHOWN: &[f64] = &[50.0, 90.0, 99.0, 99.9];

impl fmt::Display for GuestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.0} IOPS ({} reads); latency mean {}",
            self.iops,
            self.count,
            Us(self.mean_ns)
        )?;
        for (percent, ns) in &self.percentiles {
            write!(f, ", p{percent} {}", Us(*ns as f64))?;
        }
        write!(f, ", max {}", Us(self.max_ns as f64))
    }
}

/// A time in microseconds, given in nanoseconds.
struct Us(f64);

impl fmt::Display for Us {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} us", self.0 / 1000.0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accelerator = match self.accelerator {
            Accelerator::Kvm => "KVM",
            Accelerator::Tcg => "emulated: no hardware virtualisation here, times are stretched",
        };
        writeln!(f, "guest ({accelerator}), {}", host_line())?;
        writeln!(
            f,
            "  4k sequential read, O_DIRECT, one at a time: {}",
            self.guest
        )?;
        if !self.server.trim().is_empty() {
            write!(
                f,
                "\nserver, where its share of that time went\n{}",
                self.server
            )?;
        }
        Ok(())
    }
}

impl Report {
    /// The same as a JSON value; `server` is the server's own JSON when it printed some.
    pub fn to_json(&self) -> Value {
        let percentiles: serde_json::Map<String, Value> = self
            .guest
            .percentiles
            .iter()
            .map(|(p, ns)| (format!("p{p}_ns"), json!(ns)))
            .collect();
        let server = serde_json::from_str(&self.server).unwrap_or_else(|_| json!(self.server));
        json!({
            "scenario": "seqread",
            "accelerator": self.accelerator.name(),
            "guest": {
                "iops": self.guest.iops,
                "count": self.guest.count,
                "mean_ns": self.guest.mean_ns,
                "percentiles": percentiles,
                "max_ns": self.guest.max_ns,
            },
            "server": server,
        })
    }
}

fn host_line() -> String {
    match host::qemu_version() {
        Ok((major, minor)) => format!("QEMU {major}.{minor}"),
        Err(_) => "QEMU".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_report_of_version_3() {
        let text = "fio: a warning\n{\"jobs\": [{\"read\": {\"iops\": 3571.5, \"total_ios\": 35715,
            \"clat_ns\": {\"mean\": 278000.0, \"max\": 9000000, \"percentile\":
            {\"1.000000\": 1, \"50.000000\": 270000, \"99.000000\": 400000}}}}]}";
        let report = parse_fio(text).unwrap();
        assert_eq!(report.count, 35715);
        assert_eq!(report.percentiles, [(50.0, 270_000), (99.0, 400_000)]);
        let line = report.to_string();
        assert!(line.starts_with("3572 IOPS (35715 reads); latency mean 278.0 us, p50 270.0 us"));
    }
}
