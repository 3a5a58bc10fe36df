use super::*;
use crate::info::FrontEnd;
use crate::live::LimiterKind;
use fathom_trace::{Op, Recorder, Stage, StageHistograms, Stamps, TraceRecord, Wire};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// A disk with one worker.
struct Disk {
    name: &'static str,
    histograms: Arc<StageHistograms>,
    recorder: Recorder,
}

impl Disk {
    fn new(name: &'static str) -> Disk {
        let histograms = Arc::new(StageHistograms::default());
        Disk {
            name,
            recorder: Recorder::new(histograms.clone()),
            histograms,
        }
    }

    /// Records `n` reads of 4 KiB that spend half of their time in filters.
    fn read(&mut self, n: u64, micros: u64) {
        let clock = Clock::get();
        for _ in 0..n {
            let at = |micros| clock.ticks(Duration::from_micros(micros));
            let mut stamps = Stamps::start(0);
            stamps.enter(Stage::Queue, 0);
            stamps.enter(Stage::Device, at(micros / 2));
            stamps.end(at(micros));
            let record = || TraceRecord {
                stamps: stamps.raw(),
                offset: 0,
                len: 4096,
                queue: 0,
                op: Op::Read,
                error: 0,
                polled: false,
                wire: Wire::None,
            };
            self.recorder.record(Op::Read, 4096, &stamps, record);
        }
        self.recorder.flush();
    }

    fn fail(&mut self, n: u64) {
        (0..n).for_each(|_| self.recorder.failed(Op::Read, libc::EIO));
    }

    fn measure(&self, seconds: f64, cpu_ms: u64) -> Measured {
        let worker = json!({
            "requests": 5, "notifications": 0, "sleeps": 0, "polled_ns": 0, "cpu_ns": cpu_ms * 1_000_000
        });
        let counts = json!({
            "histograms": [self.histograms.state()], "workers": [], "refused": 0, "seconds": seconds
        });
        let mut measured = Measured::made(self.name, worker, counts);
        measured.info.front_end = Some(FrontEnd { pid: 0 });
        measured.process.pid = 7;
        measured.process.cpu_ns = cpu_ms * 1_000_000;
        (measured.in_flight, measured.front_ends) = (2, 1);
        measured
    }
}

fn own() -> ProcessInfo {
    ProcessInfo {
        pid: 1,
        ..ProcessInfo::default()
    }
}

#[test]
fn an_interval_is_what_has_come_in_it() {
    let mut disk = Disk::new("a");
    disk.read(10_000, 900);
    let start = Instant::now();
    let mut sampler = Sampler::default();
    let mut take = |disk: Measured, seconds| {
        sampler.take(vec![disk], own(), start + Duration::from_secs(seconds))
    };
    assert_eq!(take(disk.measure(10.0, 500), 0), None);
    disk.read(4000, 100);
    disk.fail(8);
    let sample = take(disk.measure(12.0, 1500), 2).unwrap();
    assert_eq!((sample.number, sample.seconds), (1, 2.0));
    // Only one of the two processes has used CPU time.
    assert!((sample.cpu_percent - 50.0).abs() < 1e-6 && sample.memory == 4096);
    let one = &sample.disks[0];
    let all = &one.all;
    assert_eq!(
        (all.requests, all.bytes, all.errors),
        (4000, 4000 * 4096, 8)
    );
    assert_eq!((all.iops, all.errors_per_second), (2000.0, 4.0));
    for us in [all.mean_us, all.p50_us, all.p99_us, all.max_us] {
        assert!((us.unwrap() / 100.0 - 1.0).abs() < 0.04, "{all:?}");
    }
    assert!((all.stages_us["queue"] - 50.0).abs() < 1.0, "{all:?}");
    assert_eq!(one.op("read").unwrap(), all);
    assert!(one.op("write").is_none());
    assert!((one.mean_in_flight - 0.2).abs() < 0.01, "{one:?}");
    assert_eq!(one.cpu_percent, Some(50.0));
    assert_eq!(one.histogram.iter().map(|(_, n)| n).sum::<u64>(), 4000);
    let (bucket, _) = one.histogram[0];
    assert!((90e3..105e3).contains(&crate::live::bucket_ns(bucket)));
    assert_eq!(one.front_end.as_ref().unwrap().pid, 0);
    // The sample survives a conversion to JSON and back.
    let text = serde_json::to_string(&sample).unwrap();
    assert_eq!(serde_json::from_str::<Sample>(&text).unwrap(), sample);
    // No request has completed since.
    let sample = take(disk.measure(13.0, 1500), 3).unwrap();
    let one = &sample.disks[0];
    assert_eq!((one.all.requests, one.all.p50_us), (0, None));
    assert_eq!(one.limiter.kind, LimiterKind::Stuck);
}

#[test]
fn a_disk_that_comes_back_counts_anew() {
    let mut old = Disk::new("a");
    old.read(1000, 100);
    let start = Instant::now();
    let mut sampler = Sampler::default();
    sampler.take(vec![old.measure(50.0, 900)], own(), start);
    let mut new = Disk::new("a");
    new.read(10, 100);
    let at = |seconds| start + Duration::from_secs_f64(seconds);
    let sample = sampler.take(vec![new.measure(0.5, 100)], own(), at(1.0));
    let one = &sample.unwrap().disks[0];
    assert!(one.restarted);
    assert_eq!(
        (one.all.requests, one.all.iops, one.seconds),
        (10, 20.0, 0.5)
    );
    assert_eq!(one.cpu_percent, Some(20.0));
    new.read(5, 100);
    let sample = sampler.take(vec![new.measure(1.5, 100)], own(), at(2.0));
    let one = &sample.unwrap().disks[0];
    assert_eq!((one.restarted, one.all.requests), (false, 5));
}

#[test]
fn who_was_not_heard_of_for_a_while_has_done_what_it_has() {
    let (mut a, mut b) = (Disk::new("a"), Disk::new("b"));
    a.read(1000, 100);
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs_f64(seconds);
    let mut sampler = Sampler::default();
    sampler.take(vec![a.measure(50.0, 0)], own(), start);
    assert_eq!(sampler.take(vec![], own(), at(1.0)).unwrap().disks, []);
    a.read(6, 100);
    // All counts of a new disk are in its first interval; those of an older disk are unknown.
    b.read(3, 100);
    let mut c = Disk::new("c");
    c.read(100, 100);
    let told = vec![c.measure(70.0, 0), a.measure(52.0, 0), b.measure(0.2, 0)];
    let sample = sampler.take(told, own(), at(2.0)).unwrap();
    let disks: Vec<_> = { sample.disks.iter() }
        .map(|disk| (&*disk.name, disk.all.requests, disk.all.iops.round()))
        .collect();
    assert_eq!(disks, [("a", 6, 3.0), ("b", 3, 15.0)]);
}
