//! Runs fio and parses its report.

use std::path::Path;
use std::time::Duration;

use fathom_load::files::fio;
use fathom_run::evidence::{Bare, Load};

use super::{Worked, latencies, rates};
use crate::error::Result;
use crate::host;

/// Properties of fio's jobs that its report does not have.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of threads.
    pub threads: u32,
    /// Number of requests that each thread keeps in flight.
    pub depth: u32,
}

/// Additional time for fio to start and to end.
pub const AROUND_FIO: Duration = Duration::from_secs(120);

/// Returns a script for a guest's shell that runs a job and prints its report. [`Worked::of_fio`]
/// parses the report if it is JSON of one group. If the job fails, the script prints fio's
/// messages.
pub fn fio_script(job: &str) -> String {
    format!(
        "fio {job} --output=/tmp/fio.json >/tmp/fio.log 2>&1 || \
         {{ cat /tmp/fio.log; exit 1; }}\ncat /tmp/fio.json"
    )
}

/// Runs fio with these arguments on this machine.
///
/// # Errors
/// When fio fails.
pub fn fio_on_host(job: &[String], shape: Shape) -> Result<Bare> {
    let job: Vec<&str> = job.iter().map(String::as_str).collect();
    Ok(Worked::of_fio(&host::run("fio", &job)?, shape)?.bare())
}

/// Returns the host's run time for a job that takes `runtime` in a guest. The host's run time is
/// shorter, because no cache has to be filled.
pub fn host_time(runtime: Duration) -> Duration {
    (runtime / 5).clamp(Duration::from_millis(500), Duration::from_secs(10))
}

/// Returns a path for fio's list of files, in which colons separate files and must be escaped.
pub fn fio_file(path: &Path) -> String {
    path.to_string_lossy().replace(':', "\\:")
}

impl Worked {
    /// Parses fio's JSON of one group of jobs.
    ///
    /// # Errors
    /// When the text is not such a report, or jobs failed.
    pub fn of_fio(text: &str, shape: Shape) -> Result<Worked> {
        let group = fio::results(text)?;
        let requests: u64 = group.operations.iter().map(|one| one.ios).sum();
        let bytes = group.operations.iter().map(|one| one.bytes).sum();
        let sum = |figure: fn(&_) -> f64| group.operations.iter().map(figure).sum();
        let mut measures = rates(sum(|one| one.iops), sum(|one| one.mb_per_s), requests);
        for one in &group.operations {
            // With a single kind of operation, its name is left out.
            let prefix = match group.operations.len() {
                1 => String::new(),
                _ => format!("{}.", one.op),
            };
            measures.extend(latencies(&prefix, &one.latency, one.ios));
        }
        let spent: f64 = { group.operations.iter() }
            .map(|one| one.latency.mean_ns * one.ios as f64)
            .sum();
        let each = group.cpu / f64::from(shape.threads.max(1));
        let load = Load {
            threads: shape.threads,
            depth: shape.depth,
            requests,
            bytes,
            seconds: group.runtime,
            // fio's latency starts after its own work for a request.
            mean_ns: spent / requests.max(1) as f64,
            thread_cpu: vec![each; shape.threads as usize],
            polls: false,
        };
        Ok(Worked { measures, load })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Shape = Shape {
        threads: 1,
        depth: 1,
    };

    fn side(ios: u64, iops: f64) -> String {
        format!(
            r#"{{"iops": {iops}, "total_ios": {ios}, "io_bytes": 23408640, "runtime": 1600,
            "bw_bytes": 14630400, "clat_ns": {{"mean": 278000.0, "max": 9000000, "percentile":
            {{"1.000000": 1, "50.000000": 270000, "90.000000": 300000, "99.000000": 400000,
            "99.900000": 5}}}}}}"#
        )
    }

    #[test]
    fn a_report_of_version_3() {
        let text = format!(
            "fio: a warning\n{{\"jobs\": [{{\"usr_cpu\": 5.0, \"sys_cpu\": 20.0,
             \"job_runtime\": 1600, \"read\": {}}}]}}",
            side(5715, 3571.5)
        );
        let Worked { measures, load } = Worked::of_fio(&text, ONE).unwrap();
        assert_eq!((load.requests, load.bytes), (5715, 23_408_640));
        // A quarter of 1.6 s.
        assert!((load.thread_cpu[0] - 0.4).abs() < 1e-9, "{load:?}");
        let said: Vec<_> = measures
            .iter()
            .map(|m| (m.name.as_str(), m.value))
            .collect();
        let wanted = [
            ("iops", 3571.5),
            ("throughput", 14.6304),
            ("latency.mean", 278_000.0),
            ("latency.p50", 270_000.0),
            ("latency.p90", 300_000.0),
            // Only five samples are beyond p99.9, so it is not reported.
            ("latency.p99", 400_000.0),
            ("latency.max", 9_000_000.0),
        ];
        assert_eq!(said, wanted);
        assert!(measures.iter().all(|measure| measure.samples == 5715));
        assert!(Worked::of_fio("fio: failed", ONE).is_err());
    }

    #[test]
    fn reads_and_writes_are_told_apart_and_added_up() {
        let text = format!(
            "{{\"jobs\": [{{\"usr_cpu\": 50.0, \"sys_cpu\": 0.0, \"job_runtime\": 6400,
             \"read\": {}, \"write\": {}}}]}}",
            side(3000, 1875.0),
            side(1000, 625.0)
        );
        let shape = Shape {
            threads: 4,
            depth: 2,
        };
        let Worked { measures, load } = Worked::of_fio(&text, shape).unwrap();
        assert_eq!((load.requests, load.thread_cpu.len()), (4000, 4));
        assert!((load.thread_cpu[0] - 0.8).abs() < 1e-9, "{load:?}");
        let value = |name: &str| {
            let found = measures.iter().find(|measure| measure.name == name);
            found.map(|measure| (measure.value, measure.samples))
        };
        assert_eq!(value("iops"), Some((2500.0, 4000)));
        assert_eq!(value("write.latency.p90"), Some((300_000.0, 1000)));
        assert_eq!(value("read.latency.p99"), Some((400_000.0, 3000)));
        assert_eq!(value("latency.p99"), None);
    }
}
