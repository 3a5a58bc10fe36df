//! Disks and servers for tests.

use super::look::Look;
use fathom_metrics::{DiskSample, Figures, Limiter, LimiterKind, OpSample, Sample, WorkerSample};

/// Returns the abilities of a modern terminal.
pub fn look() -> Look {
    Look {
        colour: true,
        many: true,
        unicode: true,
        can_move: true,
    }
}

/// Returns a disk with `iops` reads of 4 KiB per second, which take 80 us each.
pub fn disk(name: &str, iops: f64) -> DiskSample {
    let some = |us: f64| (iops > 0.0).then_some(us);
    let stages = [("queue", 20.0), ("device", 60.0), ("wake", 0.0)];
    let stages = stages.into_iter().filter(|_| iops > 0.0);
    let figures = Figures {
        requests: iops as u64,
        bytes: iops as u64 * 4096,
        errors: 0,
        iops,
        bytes_per_second: iops * 4096.0,
        errors_per_second: 0.0,
        mean_us: some(80.0),
        p50_us: some(78.0),
        p99_us: None,
        max_us: some(120.0),
        stages_us: stages.map(|(name, us)| (name.to_owned(), us)).collect(),
    };
    DiskSample {
        name: name.to_owned(),
        image: "/srv/a.img".to_owned(),
        format: "raw".to_owned(),
        engine: "io_uring".to_owned(),
        size: 1 << 30,
        read_only: false,
        frozen: false,
        pool: None,
        pid: 1,
        filters: Vec::new(),
        front_end: None,
        nbd_clients: 0,
        fuse_opens: 0,
        seconds: 1.0,
        restarted: false,
        operations: vec![OpSample {
            op: "read".to_owned(),
            figures: figures.clone(),
        }],
        all: figures,
        refused: 0,
        in_flight: 1,
        mean_in_flight: 1.0,
        cpu_percent: Some(12.0),
        pool_cpu_percent: None,
        polling_percent: 0.0,
        workers: vec![WorkerSample::default()],
        queues: Vec::new(),
        limiter: Limiter {
            kind: LimiterKind::Latency,
            text: "latency: 1 in flight / 80 us".to_owned(),
        },
        histogram: if iops > 0.0 {
            vec![(65, iops as u64)]
        } else {
            Vec::new()
        },
    }
}

pub fn sample(pid: u32, disks: Vec<DiskSample>) -> Sample {
    Sample {
        time_ms: 0,
        seconds: 1.0,
        number: 1,
        version: "1".to_owned(),
        pid,
        cpu_percent: 25.0,
        memory: 1 << 20,
        disks,
    }
}
