//! Measures how fast the analyses of threads read a run: events per second, and peak memory.
//!
//! `cargo run --release -p fathom-report --example events_per_second [MILLIONS]`

use std::path::Path;
use std::time::Instant;

use fathom_report::calls::Calls;
use fathom_report::locks::Locks;
use fathom_report::qemu::Steps;
use fathom_report::time_lines::TimeLines;
use fathom_run::{Event, Kind, Stream, StreamWriter};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const QEMU_EVENTS: [&str; 6] = [
    "virtio_queue_notify",
    "virtio_blk_handle_read",
    "thread_pool_submit_aio",
    "thread_pool_complete_aio",
    "virtio_blk_rw_complete",
    "virtio_notify_irqfd",
];

fn main() -> Outcome<()> {
    let millions: u64 = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 4,
    };
    let count = millions * 1_000_000;
    let dir = tempfile::tempdir()?;
    let syscalls = dir.path().join("syscalls.events");
    let qemu = dir.path().join("qemu.events");
    write_calls(&syscalls, count)?;
    write_steps(&qemu, count)?;
    println!(
        "{:24} {:>12} {:>14} {:>10}",
        "", "events", "events/s", "peak MiB"
    );

    measure("read alone", &syscalls, &mut |_, _| {})?;
    let mut calls = Calls::new();
    measure("calls", &syscalls, &mut |time, event| {
        calls.add(time, event)
    })?;
    let mut locks = Locks::new();
    measure("locks by futex", &syscalls, &mut |time, event| {
        locks.add_call(time, event);
    })?;
    let mut lines = TimeLines::first(i64::MAX / 2);
    measure("time lines", &syscalls, &mut |time, event| {
        lines.add(time, event);
    })?;
    let mut steps = Steps::new(&QEMU_EVENTS.map(str::to_owned));
    measure("QEMU's steps", &qemu, &mut |time, event| {
        steps.add(time, event)
    })?;

    let tables = calls.finish(&[]).0.len();
    let rows = locks.finish(&[], &[], &|_, _| None).0.len();
    let steps = steps.finish(None).0.len();
    println!(
        "{tables} threads, {rows} locks, {steps} steps, {} lines",
        lines.finish(&[]).len()
    );
    Ok(())
}

fn measure(name: &str, path: &Path, take: &mut dyn FnMut(i64, &Event)) -> Outcome<()> {
    let start = Instant::now();
    let mut stream = Stream::open(path)?;
    let mut count = 0u64;
    while let Some(event) = stream.next_event()? {
        take(event.time.cast_signed(), &event);
        count += 1;
    }
    let rate = count as f64 / start.elapsed().as_secs_f64();
    println!("{name:24} {count:>12} {rate:>14.0} {:>10}", peak_mib()?);
    Ok(())
}

/// Returns the peak memory of this process in MiB.
fn peak_mib() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 = line
        .and_then(|rest| rest.split_whitespace().next())
        .ok_or("no VmHWM in /proc/self/status")?
        .parse()?;
    Ok(kib / 1024)
}

/// Returns times that vary like real ones, but are cheap: the low bits of a square.
fn jitter(number: u64) -> u64 {
    number.wrapping_mul(number) >> 5 & 1023
}

/// Writes the calls of sixteen threads in turn, each with five kinds of calls.
fn write_calls(path: &Path, count: u64) -> Outcome<()> {
    const CALLS: [[u64; 3]; 5] = [
        [16, 9, 0xae80],
        [209, 1, 1],
        [271, 0x7f00, 2],
        [0, 8, 0],
        [202, 0x5500, 128],
    ];
    let mut writer = StreamWriter::create(path, 5, Vec::new())?;
    let mut time = 0;
    for number in 0..count {
        time += 100 + jitter(number);
        let tid = 100 + (number % 16) as u32;
        let turn = number / 16;
        let [nr, arg0, arg1] = CALLS[(turn / 2 % 5) as usize];
        let event = if turn % 2 == 0 {
            Event::new(time, Kind::SysEnter, 0, tid, &[nr, arg0, arg1, 0, 0])
        } else {
            Event::new(time, Kind::SysExit, 0, tid, &[nr, 0])
        };
        writer.push(&event)?;
    }
    writer.finish()?;
    Ok(())
}

/// Writes requests that pass through the thread pool one at a time.
fn write_steps(path: &Path, count: u64) -> Outcome<()> {
    let mut writer = StreamWriter::create(path, 7, QEMU_EVENTS.map(str::to_owned).into())?;
    let mut time = 0;
    for number in 0..count {
        time += 100 + jitter(number);
        let name = number % 6;
        let args: &[u64] = match name {
            0 => &[0, 0x55, 0, 0x66],
            1 => &[1, 0x55, 0x77, 8, 8],
            2 => &[2, 0x11, 0x88, 0x99],
            3 => &[3, 0x11, 0x88, 0x99, 0],
            4 => &[4, 0x55, 0x77, 0],
            _ => &[5, 0x55, 0x66],
        };
        writer.push(&Event::new(time, Kind::Qemu, 0, 9, args))?;
    }
    writer.finish()?;
    Ok(())
}
