//! Paths of requests, from the text of `perf script`: the devices to which requests were handed,
//! the calling functions, and the events in between.
//!
//! ```text
//! fio  496/500  486.954325: block:block_rq_issue: 254,0 R 4096 () 102810896 + 8 [fio]
//!         ffffffff81b04c5f blk_mq_start_request ([kernel.kallsyms])
//!         ffffffff81d74033 virtio_queue_rq ([virtio_blk])
//!
//! fio  496/500  486.954410: block:block_rq_complete: 254,0 R () 102810896 + 8 [0]
//! fio  490/490  486.954000: PERF_RECORD_FORK(496:500):(490:490)
//! ```

mod requests;
mod tasks;

use std::collections::HashMap;

use fathom_run::folded::{Folded, Side};
use fathom_run::{Between, Crossing, Handed, Stack};

use crate::perf::{Head, Modules, Text};
use tasks::Tasks;

pub use requests::{Of, READ, SCHEDULER};

/// Fields that `perf script` prints.
pub const FIELDS: &str = "comm,pid,tid,time,event,trace,ip,sym,dso";

/// Maximum number of frames of a stack.
const MOST_FRAMES: usize = 256;
/// Frames that perf finds in code without frame pointers: arbitrary numbers instead of callers.
const NOWHERE: [&str; 3] = [
    "[unknown] [unknown]",
    "[unknown] [kernel]",
    "[unknown] [anon]",
];
/// Maximum number of devices of a side.
const MOST_DEVICES: usize = 16;
/// Maximum number of incomplete requests.
const MOST_PENDING: usize = 100_000;
/// Maximum number of stacks of a device that are reported.
const MOST_STACKS: usize = 3;
/// A device is ignored if it has less than this fraction (1/`STRAY`) of the busiest device's
/// requests.
const STRAY: u64 = 10;
/// Name of perf, which observes requests and does not carry them.
const PERF: &str = "perf";

/// The requests that are followed.
#[derive(Debug)]
pub struct Watch {
    pub of: Of,
    /// Processes that carry requests, each with a prefix for the names of its threads. Descendants
    /// of these processes carry requests, too. Threads of the kernel may carry requests of any
    /// process.
    pub carriers: Vec<(u32, &'static str)>,
    /// The only device that is followed, as in events (`254,0`). `None`: all devices.
    pub device: Option<String>,
    /// The crossings that are counted.
    pub crossings: Vec<Crossing>,
}

/// Converts text to one side's part of a path.
#[derive(Debug)]
pub struct Trace {
    text: Text,
    state: State,
}

#[derive(Debug)]
struct State {
    watch: Watch,
    modules: Modules,
    tasks: Tasks,
    /// The request whose frames are being read, from the innermost to the outermost.
    open: Option<Open>,
    /// Devices in the order of their first requests.
    devices: Vec<Device>,
    /// Times at which requests were handed to a device.
    pending: HashMap<(String, String), f64>,
    counts: Counts,
}

type Counts = HashMap<Crossing, u64>;

#[derive(Debug)]
struct Open {
    device: usize,
    thread: String,
    frames: Vec<String>,
    /// Whether a frame was unknown. The frames beyond are then wrong.
    is_lost: bool,
}

#[derive(Debug)]
struct Device {
    name: String,
    requests: u64,
    /// Number of requests whose completion was seen.
    completed: u64,
    seconds: f64,
    stacks: Folded,
    /// Counts at the first and at the last request.
    first: Counts,
    last: Counts,
}

impl Trace {
    pub fn new(watch: Watch, modules: Modules) -> Trace {
        let state = State {
            watch,
            modules,
            tasks: Tasks::default(),
            open: None,
            devices: Vec::new(),
            pending: HashMap::new(),
            counts: Counts::new(),
        };
        Trace {
            text: Text::default(),
            state,
        }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, chunk: &[u8]) {
        self.text.push(chunk, &mut |line| self.state.line(line));
    }

    /// Returns the side's devices and crossings. Devices have the names from their events.
    pub fn finish(mut self, side: Side) -> (Vec<Handed>, Vec<Between>) {
        self.text.end(&mut |line| self.state.line(line));
        self.state.close();
        let State { watch, devices, .. } = self.state;
        let most = devices.iter().map(|one| one.requests).max().unwrap_or(0);
        let ours = devices.into_iter();
        let ours = ours.filter(|one| one.requests.saturating_mul(STRAY) >= most);
        let ours: Vec<Device> = ours.collect();
        let between = ours
            .first()
            .map(|clock| clock.between(side, &watch.crossings));
        let handed = ours.into_iter().filter_map(|one| one.handed(side));
        (ways(handed.collect()), between.unwrap_or_default())
    }
}

/// Removes schedulers whose threads call the driver themselves. The disk's stack then has all
/// frames.
fn ways(handed: Vec<Handed>) -> Vec<Handed> {
    let thread = |one: &Handed| one.stacks.first().map(|stack| stack.thread.clone());
    let goes_on = |one: &Handed| {
        let disk = one.device.strip_suffix(SCHEDULER);
        let mut others = handed.iter().filter(|other| Some(&*other.device) == disk);
        others.any(|disk| thread(disk) == thread(one))
    };
    let goes_on: Vec<bool> = handed.iter().map(goes_on).collect();
    let ways = handed.into_iter().zip(goes_on);
    ways.filter_map(|(one, goes_on)| (!goes_on).then_some(one))
        .collect()
}

impl State {
    fn line(&mut self, line: &str) {
        if line.trim().is_empty() {
            return self.close();
        }
        if let Some(head) = Head::parse(line) {
            self.close();
            if let Some((time, rest)) = head.rest.split_once(": ") {
                let time = time.parse().unwrap_or(0.0);
                self.head(&head, time, rest.trim_start());
            }
        } else if let Some(open) = &mut self.open
            && open.frames.len() < MOST_FRAMES
            && let Some(frame) = self.modules.frame(line)
        {
            open.is_lost |= NOWHERE.contains(&frame.as_str());
            if !open.is_lost {
                open.frames.push(frame);
            }
        }
    }

    fn head(&mut self, head: &Head, time: f64, rest: &str) {
        if let Some(tasks) = rest.strip_prefix("PERF_RECORD_FORK") {
            return self.tasks.begun(tasks).unwrap_or_default();
        }
        let Some((event, text)) = rest.split_once(": ") else {
            return;
        };
        let of = self.watch.of;
        if let Some((device, number)) = of.handed(event, text) {
            self.handed(head, time, device, number);
        } else if let Some((device, number)) = of.completed(event, text) {
            self.completed(time, format!("{device}{SCHEDULER}"), &number);
            self.completed(time, device, &number);
        } else {
            self.count(head, event, text);
        }
    }

    /// Returns the prefix for a carrier's threads; `None` if the process is not a carrier.
    fn carrier(&self, process: u32) -> Option<&'static str> {
        self.tasks.above(process).find_map(|one| {
            let mut known = self.watch.carriers.iter();
            known
                .find(|(pid, _)| *pid == one)
                .map(|(_, prefix)| *prefix)
        })
    }

    fn handed(&mut self, head: &Head, time: f64, device: String, number: String) {
        let carrier = self.carrier(head.pid);
        if carrier.is_none() && !self.tasks.is_kernels(head.pid) {
            return;
        }
        let bare = device.trim_end_matches(SCHEDULER);
        if self
            .watch
            .device
            .as_ref()
            .is_some_and(|wanted| wanted != bare)
        {
            return;
        }
        let known = self.devices.iter().position(|one| one.name == device);
        let place = match known {
            Some(place) => place,
            None if self.devices.len() < MOST_DEVICES => {
                self.devices.push(Device::new(&device, &self.counts));
                self.devices.len() - 1
            }
            None => return,
        };
        let counts = self.counts.clone();
        let one = &mut self.devices[place];
        (one.requests, one.last) = (one.requests + 1, counts);
        if self.pending.len() < MOST_PENDING {
            self.pending.insert((device, number), time);
        }
        self.open = Some(Open {
            device: place,
            thread: thread(carrier.unwrap_or_default(), head.comm),
            frames: Vec::new(),
            is_lost: false,
        });
    }

    fn completed(&mut self, time: f64, device: String, number: &str) {
        let request = (device, number.to_owned());
        if let Some(at) = self.pending.remove(&request)
            && let Some(device) = self.devices.iter_mut().find(|one| one.name == request.0)
        {
            device.completed += 1;
            device.seconds += (time - at).max(0.0);
        }
    }

    fn count(&mut self, head: &Head, event: &str, text: &str) {
        let crossing = match event {
            "kvm:kvm_exit" => Crossing::Exits,
            "sched:sched_switch" => Crossing::Switches,
            "sched:sched_wakeup" => Crossing::WakeUps,
            "raw_syscalls:sys_enter" => Crossing::Calls,
            _ => return,
        };
        // A wake-up counts for the woken thread. The current thread may just have been interrupted.
        let (comm, process) = match crossing {
            Crossing::WakeUps => {
                let (comm, tid) = woken(text).unwrap_or_default();
                (comm, self.tasks.process(tid))
            }
            _ => (head.comm, Some(head.pid)),
        };
        if process.is_some_and(|one| self.carrier(one).is_some()) && comm != PERF {
            *self.counts.entry(crossing).or_default() += 1;
        }
    }

    fn close(&mut self) {
        let Some(open) = self.open.take() else {
            return;
        };
        let thread = std::iter::once(open.thread.as_str());
        let frames = open.frames.iter().rev().map(String::as_str);
        self.devices[open.device]
            .stacks
            .add(thread.chain(frames), 1);
    }
}

impl Device {
    fn new(name: &str, counts: &Counts) -> Device {
        Device {
            name: name.to_owned(),
            requests: 0,
            completed: 0,
            seconds: 0.0,
            stacks: Folded::default(),
            first: counts.clone(),
            last: counts.clone(),
        }
    }

    /// Returns the crossings per request, between the first and the last request. Empty if there
    /// are fewer than two requests.
    fn between(&self, side: Side, crossings: &[Crossing]) -> Vec<Between> {
        let one = |what: &Crossing| {
            let [first, last] = [&self.first, &self.last].map(|counts| counts.get(what));
            let count = last.copied().unwrap_or(0) - first.copied().unwrap_or(0);
            Between {
                side,
                what: *what,
                per_request: count as f64 / (self.requests - 1) as f64,
            }
        };
        match self.requests {
            0 | 1 => Vec::new(),
            _ => crossings.iter().map(one).collect(),
        }
    }

    fn handed(self, side: Side) -> Option<Handed> {
        let stacks = self.stacks.stacks().filter_map(|(stack, requests)| {
            let (thread, frames) = stack.split_first()?;
            Some(Stack {
                requests,
                thread: (*thread).to_owned(),
                frames: frames.iter().map(|&frame| frame.to_owned()).collect(),
            })
        });
        let mut stacks: Vec<Stack> = stacks.collect();
        stacks.sort_by(|a, b| {
            let often = b.requests.cmp(&a.requests);
            often.then_with(|| (&a.thread, &a.frames).cmp(&(&b.thread, &b.frames)))
        });
        stacks.truncate(MOST_STACKS);
        let mean = self.seconds * 1e9 / self.completed as f64;
        (!stacks.is_empty()).then_some(Handed {
            side,
            device: self.name,
            requests: self.requests,
            device_ns: (self.completed > 0).then_some(mean),
            stacks,
        })
    }
}

/// Parses the name and thread ID in `comm=a name pid=18 prio=0 target_cpu=000`. The name may
/// contain anything.
fn woken(text: &str) -> Option<(&str, u32)> {
    let (comm, rest) = text.strip_prefix("comm=")?.rsplit_once(" pid=")?;
    Some((comm, rest.split(' ').next()?.parse().ok()?))
}

/// Returns the name of a thread. The kernel's workers, whose names have numbers, get one name.
fn thread(prefix: &str, comm: &str) -> String {
    const WORKER: &str = "kworker";
    match comm.starts_with(WORKER) {
        true => WORKER.to_owned(),
        false => format!("{prefix}{comm}"),
    }
}

#[cfg(test)]
mod tests;
