//! The benchmark on real files, with fio as the other opinion.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_lab::workload::{self, Engine, Limit, Options, Outcome, Rw};
use fathom_run::{Event, Kind, Stream, flags};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;

/// A file on the disk that the target directory is on: a file system with direct I/O, which a
/// tmpfs on /tmp need not be.
struct Image {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn image() -> Image {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("image");
    let mut file = File::create(&path).unwrap();
    for block in 0..BLOCKS {
        file.write_all(&[block as u8; BLOCK as usize]).unwrap();
    }
    file.sync_all().unwrap();
    Image { _dir: dir, path }
}

fn options(image: &Image, count: u64) -> Options {
    Options::new(&image.path).with_limit(Limit::Operations(count))
}

fn written(outcome: &Outcome) -> Vec<Event> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bench.events");
    let count = outcome.write(&path).unwrap();
    let mut stream = Stream::open(&path).unwrap();
    let mut events = Vec::new();
    while let Some(event) = stream.next_event().unwrap() {
        events.push(event);
    }
    assert!(!stream.is_cut());
    assert_eq!(events.len() as u64, count);
    events
}

fn operations(outcome: &Outcome) -> Vec<Event> {
    let mut events = written(outcome);
    events.retain(|event| event.kind == Kind::BenchOperation);
    assert_eq!(events.len() as u64, outcome.benchmark.operations);
    events
}

fn ns(outcome: &Outcome, ticks: u64) -> f64 {
    let [a, b] = outcome.pairs;
    let (ticks_between, ns_between) = (b.tsc - a.tsc, b.monotonic_ns - a.monotonic_ns);
    ticks as f64 * ns_between as f64 / ticks_between as f64
}

#[test]
fn single_reads_are_stamped_one_after_another() {
    let image = image();
    for positional in [false, true] {
        let mut options = options(&image, 3000);
        options.positional = positional;
        let outcome = workload::run(&options).unwrap();
        let figures = &outcome.benchmark;
        assert_eq!((figures.operations, figures.errors), (3000, 0));
        assert_eq!(figures.call, if positional { "pread" } else { "read" });
        let events = operations(&outcome);
        for (number, event) in events.iter().enumerate() {
            let [end, offset, length, result, flags, ..] = event.args;
            assert_eq!(offset, number as u64 % BLOCKS * BLOCK, "it wraps around");
            assert_eq!((length, result, flags), (BLOCK, BLOCK, 0));
            assert!(end > event.time);
            assert_eq!(event.tid, outcome.tid);
        }
        for pair in events.windows(2) {
            assert!(pair[0].args[0] <= pair[1].time, "one at a time");
        }
        let spent: u64 = events.iter().map(|e| e.args[0] - e.time).sum();
        let (own, wall) = (ns(&outcome, spent), figures.wall_ns as f64);
        assert!(own <= wall * 1.01, "{own} ns within {wall}");
        assert!((figures.mean_ns * 3000.0 - wall).abs() < 3000.0);
    }
}

#[test]
fn several_in_flight_overlap_and_stay_within_the_depth() {
    let image = image();
    for engine in [None, Some(Engine::IoUring), Some(Engine::Aio)] {
        let mut options = options(&image, 2000).with_iodepth(8).with_rw(Rw::RandRead);
        options.engine = engine;
        let outcome = workload::run(&options).unwrap();
        let expected = if engine == Some(Engine::Aio) {
            "io_submit"
        } else {
            "io_uring"
        };
        assert_eq!(outcome.benchmark.call, expected);
        assert_eq!(outcome.benchmark.errors, 0, "{engine:?}");
        let events = operations(&outcome);
        assert!(events.windows(2).all(|pair| pair[0].time <= pair[1].time));
        let mut most = 0;
        for (number, event) in events.iter().enumerate() {
            let open = |e: &&Event| e.args[0] > event.time;
            let open = events[..number].iter().filter(open).count() + 1;
            most = most.max(open);
        }
        assert!((2..=8).contains(&most), "{engine:?}: {most} in flight");
    }
}

#[test]
fn writes_write_and_stay_within_their_range() {
    let image = image();
    let mut options = options(&image, 64).with_rw(Rw::Write);
    (options.offset, options.length) = (8 * BLOCK, Some(4 * BLOCK));
    let outcome = workload::run(&options).unwrap();
    assert_eq!(outcome.benchmark.call, "write");
    assert!(
        operations(&outcome)
            .iter()
            .all(|e| e.args[4] == flags::WRITE)
    );
    options = options.with_rw(Rw::RandWrite).with_iodepth(4);
    workload::run(&options).unwrap();
    let bytes = std::fs::read(&image.path).unwrap();
    for (block, bytes) in bytes.chunks(BLOCK as usize).enumerate() {
        let untouched = bytes.iter().all(|&byte| byte == block as u8);
        assert_eq!(untouched, !(8..12).contains(&block), "block {block}");
    }
}

#[test]
fn an_injected_delay_is_in_every_other_operation_and_measured() {
    const DELAY: Duration = Duration::from_millis(3);
    let image = image();
    for iodepth in [1, 2] {
        let mut options = options(&image, 40).with_iodepth(iodepth);
        options.inject = Some(DELAY);
        let outcome = workload::run(&options).unwrap();
        let events = written(&outcome);
        let delays: Vec<&Event> = events.iter().filter(|e| e.kind == Kind::Injected).collect();
        let numbers: Vec<u64> = delays.iter().map(|e| e.args[2]).collect();
        assert_eq!(numbers, (0..20).map(|n| 2 * n + 1).collect::<Vec<_>>());
        let operations = operations(&outcome);
        for delay in delays {
            let measured = ns(&outcome, delay.args[1]);
            assert!(measured >= DELAY.as_nanos() as f64 * 0.99, "{measured}");
            let operation = operations[usize::try_from(delay.args[2]).unwrap()];
            assert!(
                operation.time <= delay.time - delay.args[1],
                "stamped before the delay"
            );
            assert!(delay.time < operation.args[0], "called after it");
        }
    }
}

#[test]
fn a_time_limit_ends_it_and_so_does_a_full_buffer() {
    let image = image();
    let mut options = options(&image, 0).with_limit(Limit::Time(Duration::from_millis(200)));
    for iodepth in [1, 4] {
        options.iodepth = iodepth;
        let outcome = workload::run(&options).unwrap();
        assert!(outcome.benchmark.wall_ns >= 190_000_000, "depth {iodepth}");
        assert_eq!(
            operations(&outcome)
                .iter()
                .filter(|e| e.args[0] == 0)
                .count(),
            0
        );
    }
    options.room = Some(10);
    assert_eq!(workload::run(&options).unwrap().benchmark.operations, 10);
}

fn refusal(change: impl FnOnce(&mut Options)) -> String {
    let image = image();
    let mut options = options(&image, 10);
    change(&mut options);
    workload::run(&options).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_measured_is_said() {
    assert!(refusal(|o| o.path = "/nonexistent".into()).contains("cannot open /nonexistent"));
    assert!(refusal(|o| o.offset = 1 << 40).contains("does not hold one block"));
    assert!(refusal(|o| o.length = Some(1 << 40)).contains("bytes; 1099511627776 from 0"));
    let closed = refusal(|o| (o.path, o.direct) = ("/proc/self/mem".into(), false));
    assert!(closed.contains("/proc/self/mem"), "{closed}");
}

/// The shortest time that fio finds for the same reads of the same file, in ns.
fn fio(path: &Path, count: u64) -> f64 {
    let size = count * BLOCK;
    let output = Command::new("fio")
        .args([
            "--name=x",
            "--rw=read",
            "--bs=4k",
            "--direct=1",
            "--ioengine=sync",
        ])
        .args(["--output-format=json", &format!("--io_size={size}")])
        .arg(format!("--filename={}", path.display()))
        .output()
        .expect("fio is installed (make setup)");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    report["jobs"][0]["read"]["clat_ns"]["min"]
        .as_f64()
        .unwrap()
}

#[test]
fn fio_finds_much_the_same() {
    let image = image();
    // The shortest times have no delays by other work of the machine. A machine may be busy during
    // all reads of one of the two programs, so one good pair of several is enough. A wrong unit or
    // a cached read would cause a difference of much more than a factor of two.
    let ratios: Vec<f64> = (0..5)
        .map(|_| {
            let ours = workload::run(&options(&image, 4096)).unwrap();
            let times = operations(&ours).into_iter();
            let shortest = times.map(|e| e.args[0] - e.time).min().unwrap();
            ns(&ours, shortest) / fio(&image.path, 4096)
        })
        .collect();
    assert!(ratios.iter().any(|r| (0.5..2.0).contains(r)), "{ratios:?}");
}
