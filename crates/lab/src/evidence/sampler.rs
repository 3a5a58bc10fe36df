//! Samples the host at a window's begin and end, and regularly in between.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fathom_run::Series;
use fathom_run::evidence::{Crossings, DeviceTime, Evidence};
use rustix::time::{ClockId, clock_gettime};

use super::calls::Calls;
use super::history::{History, Point};
use super::instructions;
use super::kernel::{self, Kernel};
use super::own_io::OwnIo;
use super::processors::{self, Cpu};
use super::threads::Threads;
use super::{Kind, Watch, Watched, cpu_limits, device, exits, groups, io_limits, pressure};
use crate::error::{Context, Result};

/// Minimum ratio of the step to the CPU time of a sample, so that sampling does not limit the load.
const COST: u32 = 100;
/// Minimum step.
const SHORTEST: Duration = Duration::from_millis(1);

/// Samples the host from [`Sampler::start`] to [`Sampler::stop`].
///
/// Both calls read each file of `Watch` once, and those of the kernel threads. On a machine with
/// hundreds of processes, the calls take some milliseconds, outside of the window. In between, a
/// thread reads one small file per watched thread, /proc/stat and the device's file. Each file
/// takes about 10 us, and the total is less than 1 % of one CPU, because the step doubles if a
/// sample costs more. [`Calls`] states its own cost.
pub struct Sampler {
    orders: Sender<Order>,
    thread: JoinHandle<Window>,
}

/// A command for the sampling thread.
enum Order {
    Watch(Watched),
    End,
}

/// Adds processes that start within the window of a [`Sampler`]. After the window, they are
/// ignored.
#[derive(Clone)]
pub struct Newcomers(Sender<Order>);

impl Newcomers {
    /// Adds a process to those that the sampler watches.
    pub fn watch(&self, process: Watched) {
        let _ = self.0.send(Order::Watch(process)); // the window may have ended
    }
}

/// State of one window.
struct Window {
    threads: Threads,
    kernel: Kernel,
    limited: Limited,
    own_io: OwnIo,
    device: Option<String>,
    /// Process id of QEMU, if there is one.
    vmm: Option<u32>,
    calls: Calls,
    instructions: instructions::Count,
    begin: Snapshot,
    history: History,
}

/// Limits of the control groups in which the watched processes are.
struct Limited {
    cpu: Vec<groups::Group>,
    io: Vec<io_limits::Limit>,
}

/// Counters at one end of the window.
struct Snapshot {
    at: Instant,
    host: Vec<Cpu>,
    pressure: Option<pressure::Totals>,
    cpu_limits: Vec<Option<cpu_limits::Stat>>,
    io_limits: Vec<Option<u64>>,
    device: Option<device::Stat>,
    exits: Option<u64>,
}

impl Sampler {
    /// Starts a window.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(watch: Watch) -> Result<Sampler> {
        let mut window = Window::begin(watch);
        let (orders, ordered) = mpsc::channel();
        let thread = thread::Builder::new().name("sampler".into());
        let thread = thread.spawn(move || {
            loop {
                let step = window.history.step();
                let passed = window.begin.at.elapsed();
                // The next multiple of the step, independent of the duration of the last sample.
                let part = passed.as_nanos() % step.as_nanos().max(1);
                let wait = step.saturating_sub(Duration::from_nanos(part as u64));
                match ordered.recv_timeout(wait) {
                    Err(RecvTimeoutError::Timeout) => window.sample(),
                    Ok(Order::Watch(process)) => window.watch(process),
                    Ok(Order::End) | Err(RecvTimeoutError::Disconnected) => return window,
                }
            }
        });
        let thread = thread.context(|| "cannot start the sampler".into())?;
        Ok(Sampler { orders, thread })
    }

    /// Returns a handle that adds processes during the window. All of their CPU time counts.
    pub fn newcomers(&self) -> Newcomers {
        Newcomers(self.orders.clone())
    }

    /// Ends the window. The evidence has what the host shows: processors, threads, control groups,
    /// pressure and the device. The caller adds the rest.
    pub fn stop(self) -> (Evidence, Vec<Series>) {
        let _ = self.orders.send(Order::End); // a panic of the thread is propagated below
        let window = self.thread.join();
        window
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .end()
    }
}

impl Window {
    fn begin(watch: Watch) -> Window {
        let kernel = kernel::look();
        // Processes that are added later are children of this process, and in its groups.
        let pids = || watch.processes.iter().map(|one| one.pid);
        let all = || pids().chain([std::process::id()]);
        let limited = Limited {
            cpu: cpu_limits::limited(all()),
            io: io_limits::limited(all()),
        };
        let own_io = OwnIo::begin(pids());
        let vmm = watch.processes.iter().find(|one| one.kind == Kind::Qemu);
        let vmm = vmm.map(|one| one.pid);
        let mut threads = Threads::new(watch.processes);
        let begin = Snapshot::take(&limited, watch.device.as_deref(), vmm);
        threads.look();
        let zero = point(
            &begin,
            &begin.host,
            begin.device.as_ref(),
            &threads,
            begin.at,
        );
        let instructions = instructions::Count::begin(&threads);
        Window {
            threads,
            kernel,
            limited,
            own_io,
            device: watch.device,
            vmm,
            calls: Calls::new(),
            instructions,
            history: History::new(watch.step.max(SHORTEST), zero),
            begin,
        }
    }

    fn watch(&mut self, process: Watched) {
        self.own_io.add(process.pid);
        self.threads.watch(process);
    }

    fn sample(&mut self) {
        let before = clock_gettime(ClockId::ThreadCPUTime);
        self.threads.look();
        self.own_io.read();
        let host = read_processors();
        let device = self.device.as_deref().and_then(device::read);
        let now = Instant::now();
        let point = point(&self.begin, &host, device.as_ref(), &self.threads, now);
        self.history.add(point);
        self.calls.sampled(self.threads.serving());
        let after = clock_gettime(ClockId::ThreadCPUTime);
        let cost = Duration::try_from(after)
            .ok()
            .zip(Duration::try_from(before).ok());
        let cost = cost.map_or(Duration::ZERO, |(after, before)| {
            after.saturating_sub(before)
        });
        if cost * COST > self.history.step() {
            self.history.thin();
        }
    }

    fn end(mut self) -> (Evidence, Vec<Series>) {
        let instructions = self.instructions.end();
        self.threads.look();
        self.own_io.read();
        let end = Snapshot::take(&self.limited, self.device.as_deref(), self.vmm);
        let (begin, kernel) = (&self.begin, kernel::look());
        let last = point(begin, &end.host, end.device.as_ref(), &self.threads, end.at);
        self.history.add(last);
        let seconds = end.at.duration_since(begin.at).as_secs_f64();
        let mut threads = self.threads.times();
        threads.extend(kernel.since(&self.kernel, seconds));
        let pressure = begin.pressure.zip(end.pressure);
        let device = self.device.as_deref().and_then(|name| {
            let (begin, end) = (begin.device.as_ref()?, end.device.as_ref()?);
            let own_bytes = self.own_io.bytes();
            Some(DeviceTime {
                own_bytes,
                ..device::between(name, begin, end, seconds)
            })
        });
        let exits = begin.exits.zip(end.exits);
        let crossings = Crossings {
            exits: exits.and_then(|(before, after)| after.checked_sub(before)),
            calls: self.calls.end(seconds),
            ..Crossings::default()
        };
        let evidence = Evidence {
            seconds,
            host: processors::between(&begin.host, &end.host),
            threads,
            cgroup: cpu_limits::between(&self.limited.cpu, &begin.cpu_limits, &end.cpu_limits),
            io_limit: io_limits::between(
                &self.limited.io,
                &begin.io_limits,
                &end.io_limits,
                seconds,
            ),
            pressure: pressure.map(|(begin, end)| pressure::between(begin, end, seconds)),
            device,
            instructions,
            crossings: (crossings != Crossings::default()).then_some(crossings),
            ..Evidence::default()
        };
        (evidence, self.history.series())
    }
}

impl Snapshot {
    fn take(limited: &Limited, device: Option<&str>, vmm: Option<u32>) -> Snapshot {
        Snapshot {
            at: Instant::now(),
            host: read_processors(),
            pressure: pressure::read(),
            cpu_limits: limited.cpu.iter().map(cpu_limits::read).collect(),
            io_limits: limited.io.iter().map(io_limits::read).collect(),
            device: device.and_then(device::read),
            exits: vmm.and_then(exits::of),
        }
    }
}

fn read_processors() -> Vec<Cpu> {
    let text = super::read(processors::PATH).unwrap_or_default();
    processors::parse(&text)
}

/// Returns the counters at an instant of the window.
fn point(
    begin: &Snapshot,
    host: &[Cpu],
    device: Option<&device::Stat>,
    threads: &Threads,
    now: Instant,
) -> Point {
    let (before, after) = (processors::total(&begin.host), processors::total(host));
    let since = |after: u64, before: u64| after.saturating_sub(before) as f64;
    let ticks = (since(after.0, before.0), since(after.1, before.1));
    let device = begin.device.as_ref().zip(device);
    Point {
        at: now.duration_since(begin.at).as_secs_f64(),
        host: (!host.is_empty()).then_some(ticks),
        device: device.map(|(before, after)| after.queued_since(before)),
        workers: threads.workers(),
    }
}
