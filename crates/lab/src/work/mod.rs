//! Converts a load's results to the measures of a cell and to the load in its evidence.

pub mod bench;
mod figures;
mod fio;
mod job;

use fathom_load::files;
use fathom_run::Measure;
use fathom_run::evidence::{Bare, Load};

pub use figures::{latencies, rates};
pub use fio::{AROUND_FIO, Shape, fio_file, fio_on_host, fio_script, host_time};
pub use job::{Engine, FioJob};

/// Results of a load.
#[derive(Clone, Debug, Default)]
pub struct Worked {
    /// Measures of the load: rates, and latencies by operation.
    pub measures: Vec<Measure>,
    /// Load for the cell's evidence.
    pub load: Load,
}

impl Worked {
    /// Converts the report of a load on files.
    pub fn of_files(report: &files::Report) -> Worked {
        let ios: u64 = report.operations.iter().map(|one| one.ios).sum();
        let bytes = report.operations.iter().map(|one| one.bytes).sum();
        let mut measures = rates(report.iops, report.mb_per_s, ios);
        for one in &report.operations {
            measures.extend(latencies(&format!("{}.", one.op), &one.latency, one.ops));
        }
        let threads = f64::from(report.threads.max(1));
        let cpu = report.client_cpu_us_per_request * ios as f64 / 1e6;
        let load = Load {
            threads: report.threads.into(),
            depth: 1,
            requests: ios,
            bytes,
            seconds: report.runtime,
            // Each operation has several requests, so this is a thread's time per request.
            mean_ns: threads * report.runtime * 1e9 / ios.max(1) as f64,
            thread_cpu: vec![cpu / threads; report.threads.into()],
            polls: false,
        };
        Worked { measures, load }
    }

    /// Returns the results as those of the same work on the bare device.
    pub fn bare(&self) -> Bare {
        let seconds = self.load.seconds.max(1e-9);
        Bare {
            requests_per_second: self.load.requests as f64 / seconds,
            bytes_per_second: self.load.bytes as f64 / seconds,
            mean_ns: self.load.mean_ns,
        }
    }
}
