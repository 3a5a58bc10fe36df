//! Runs the loads with fio: `fio --server` waits on each host, and fio's client starts all at once.
//!
//! fio's own sums are ignored: they have no percentiles, so the hosts' results and histograms are
//! merged here.

use super::told::{Host, Told};
use anyhow::{Context, bail};
use fathom_client::split_host;
use fathom_load::Direction;
use fathom_load::files::fio::latency;
use fathom_trace::Bucket;
use serde_json::{Map, Value};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Default port of fio's servers.
const PORT: u16 = 8765;
const LOOK: Duration = Duration::from_millis(100);
/// fio's names for operations, with Fathom's.
const OPERATIONS: [(&str, &str); 3] = [("read", "read"), ("write", "write"), ("trim", "discard")];
/// fio's name for the sum of all clients.
const SUM: &str = "All clients";

/// Runs a job file on all hosts and returns the results. `stop` ends the jobs early.
pub fn run(hosts: &[String], job: &Path, stop: &AtomicBool) -> anyhow::Result<Told> {
    let mut fio = Command::new("fio");
    fio.arg("--output-format=json+");
    for host in hosts {
        let at = split_host(host, PORT);
        let (name, port) = at.with_context(|| format!("'{host}' is not HOST or HOST:PORT"))?;
        fio.arg(format!("--client={name},{port}")).arg(job);
    }
    let said = output(&mut fio, stop)?;
    // Messages of fio's servers precede the JSON.
    let json = said
        .find("\n{")
        .map(|at| &said[at..])
        .or(said.starts_with('{').then_some(&said));
    let json = json.with_context(|| format!("fio: {}", first_line(&said)))?;
    let told: Value = serde_json::from_str(json).context("the output of fio is not JSON")?;
    understand(&told)
}

fn first_line(said: &str) -> &str {
    said.lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("no message")
}

/// Runs fio and returns its standard output.
fn output(fio: &mut Command, stop: &AtomicBool) -> anyhow::Result<String> {
    fio.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = fio.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => anyhow::anyhow!("fio is not installed here"),
        _ => anyhow::Error::from(error).context("cannot start fio"),
    })?;
    let (out, err) = (read(child.stdout.take()), read(child.stderr.take()));
    let mut is_asked = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if stop.load(Ordering::Relaxed) && !is_asked {
            interrupt(&child);
            is_asked = true;
        }
        thread::sleep(LOOK);
    };
    let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
    let (out, err) = (text(out), text(err));
    if !status.success() && !out.contains(SUM) && !out.contains("client_stats") {
        let said = if err.trim().is_empty() { &out } else { &err };
        bail!("fio has failed: {}", first_line(said));
    }
    Ok(out)
}

fn read(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // After an error, use the output so far.
        let _ = from.map(|mut from| from.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Interrupts fio, which then ends its jobs and reports their results.
fn interrupt(child: &Child) {
    if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
        // The process may have ended in the meantime.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
    }
}

fn understand(told: &Value) -> anyhow::Result<Told> {
    let all = told["client_stats"]
        .as_array()
        .context("the output of fio has no hosts")?;
    let mut merged = Told::default();
    for job in all.iter().filter(|job| job["jobname"] != SUM) {
        let text = |name: &str| job[name].as_str().unwrap_or("?").to_owned();
        let host = format!("{}:{}", text("hostname"), job["port"]);
        match operations(job) {
            Ok(operations) => merged.hosts.push(Host {
                host,
                job: Some(text("jobname")),
                operations,
                errors: 0,
                report: None,
            }),
            Err(problem) => merged.fail(host, &format!("{}: {problem}", text("jobname"))),
        }
    }
    Ok(merged)
}

/// Returns the results of a job's operations.
fn operations(job: &Value) -> Result<Vec<Direction>, String> {
    match job["error"].as_i64() {
        Some(0) => {}
        error => return Err(format!("error {}", error.unwrap_or(-1))),
    }
    let happened = |(fio, _): &&(&str, &str)| job[*fio]["total_ios"].as_u64().unwrap_or(0) > 0;
    let one = |(fio, op): &(&str, &str)| {
        let missing = "fio reported no rates or no latencies; remove disable_clat from the job";
        direction(&job[*fio], op).ok_or_else(|| format!("{op}: {missing}"))
    };
    OPERATIONS.iter().filter(happened).map(one).collect()
}

/// Returns the results of an operation, or `None` if figures are missing.
fn direction(told: &Value, op: &str) -> Option<Direction> {
    let (ios, clat) = (told["total_ios"].as_u64()?, &told["clat_ns"]);
    Some(Direction {
        op: op.to_owned(),
        ios,
        iops: told["iops"].as_f64()?,
        mb_per_s: told["bw_bytes"].as_f64()? / 1e6,
        latency: latency(clat, ios)?,
        histogram: clat["bins"].as_object().map(histogram).unwrap_or_default(),
    })
}

/// Converts fio's histogram. fio names a bucket by its middle; each is about 1% wide.
fn histogram(bins: &Map<String, Value>) -> Vec<Bucket> {
    let bucket = |(ns, n): (&String, &Value)| {
        let ns: f64 = ns.parse().ok()?;
        Some(Bucket(ns, ns, n.as_u64()?))
    };
    let mut all: Vec<_> = bins.iter().filter_map(bucket).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_fio_tells_is_added_up() {
        let of = |ios: u64, bins: Value| {
            json!({"total_ios": ios, "iops": 10.0, "bw_bytes": 40960,
                "clat_ns": {"mean": 1000.0, "max": 9000, "percentile": {"50.000000": 900}, "bins": bins}})
        };
        let job = |host: &str, error: i32, read: Value| {
            json!({"jobname": "j", "hostname": host, "port": 1, "error": error, "read": read,
                "write": of(0, json!({}))})
        };
        let told = json!({"client_stats": [
            job("a", 0, of(100, json!({"900": 100}))),
            job("b", 0, of(100, json!({"10000": 40, "2000": 60}))),
            job("c", 5, Value::Null),
            job("d", 0, json!({"total_ios": 5, "iops": 1.0, "bw_bytes": 4096,
                "clat_ns": {"mean": 0.0, "max": 0, "N": 0}})),
            {"jobname": SUM, "hostname": "a", "port": 1, "error": 0, "read": of(200, json!({}))},
        ]});
        let mut told = understand(&told).unwrap();
        told.merge();
        let shown = serde_json::to_value(&told).unwrap();
        let read = &shown["operations"][0];
        assert_eq!((&read["op"], &read["ios"]), (&json!("read"), &json!(200)));
        let p90 = read["p90_ns"].as_f64().unwrap();
        assert!((p90 - 9000.0).abs() < 1500.0, "{read}");
        let problems = told.problems();
        assert_eq!((problems.len(), &*problems[0]), (2, "c:1: j: error 5"));
        assert!(problems[1].contains("no latencies"), "{problems:?}");
        // A percentile that fio does not report is unknown, and not 0.
        let first = &shown["hosts"][0]["operations"][0]["latency"];
        assert_eq!(first["p50_ns"], 900.0);
        assert!(first["p90_ns"].is_null(), "{first}");
        assert!(told.to_string().contains(" - "), "{told}");
        assert_eq!(shown["hosts"][0]["job"], "j");
        assert!(understand(&json!({})).is_err());
    }
}
