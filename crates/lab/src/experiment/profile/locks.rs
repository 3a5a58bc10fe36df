//! Waits for kernel locks, from the text of `perf script`: number, time and caller of the waits.
//!
//! ```text
//! fio  250/251  [000]     12.345678: lock:contention_begin: 0xffff8881 (flags=SPIN)
//!         ffffffff81a0b0c0 _raw_spin_lock_irqsave ([kernel.kallsyms])
//!         ffffffff81a0b1c0 virtio_queue_rq ([virtio_blk])
//!
//! fio  250/251  [000]     12.345699: lock:contention_end: 0xffff8881 (ret=0)
//! ```

use std::collections::HashMap;
use std::path::Path;

use fathom_run::Side;
use fathom_run::evidence::LockWait;
use fathom_run::folded::parts;

use crate::perf::{Head, Modules, Recording, Text};

/// Fields that `perf script` prints.
const FIELDS: &str = "comm,pid,tid,cpu,time,event,trace,ip,sym,dso";
/// Exists if the kernel can trace lock contention (since Linux 5.19).
const EVENT: &str = "/sys/kernel/tracing/events/lock/contention_begin";

/// Maximum number of waits that are in progress at a time.
const MOST_OPEN: usize = 10_000;
/// Maximum number of locks, counted by caller.
const MOST_LOCKS: usize = 10_000;
/// Maximum number of locks that are reported.
const MOST_TOLD: usize = 20;
/// Prefixes of the kernel's own functions around a wait. The caller of these is of interest.
const HELPERS: [&str; 18] = [
    "trace",
    "perf_",
    "bpf_",
    "native_queued_",
    "pv_queued_",
    "queued_",
    "raw_spin_",
    "raw_read_",
    "raw_write_",
    "mutex_",
    "ww_mutex_",
    "rwsem_",
    "down_",
    "rt_mutex_",
    "rtlock_",
    "percpu_",
    "lock_",
    "do_raw_",
];

/// Returns how perf records lock contention.
pub fn recording() -> Recording {
    let events = "--event=lock:contention_begin,lock:contention_end";
    Recording {
        name: "locks",
        words: vec![events.into(), "--call-graph=fp".into()],
        fields: FIELDS,
        with_tasks: false,
        most: ["512M", "32M"],
    }
}

/// Whether this machine's kernel can trace lock contention, and the user may see it.
pub fn are_told() -> bool {
    Path::new(EVENT).exists()
}

/// Returns a shell script that checks the same in a guest; its exit status is the answer.
pub fn told_in_guest() -> String {
    format!("[ -e {EVENT} ] || mount -t tracefs tracefs /sys/kernel/tracing\n[ -e {EVENT} ]")
}

/// Converts text to waits.
#[derive(Debug, Default)]
pub struct Waits {
    text: Text,
    state: State,
}

#[derive(Debug, Default)]
struct State {
    modules: Modules,
    /// The wait whose frames are being read.
    begun: Option<(Key, Begun)>,
    open: HashMap<Key, Begun>,
    locks: HashMap<String, (u64, f64)>,
}

/// A wait: the thread, the CPU, and the lock. The CPU is only set for idle tasks: each CPU has one,
/// and all have thread ID 0.
type Key = (u32, String, String);

#[derive(Debug)]
struct Begun {
    at: f64,
    flags: String,
    /// Flags of the last begin: a wait for a mutex alternates between spinning and sleeping, and
    /// each change is a begin.
    last: String,
    caller: Option<String>,
}

/// Returns whether a wait may sleep. Interrupts wait only for locks that spin.
fn may_sleep(flags: &str) -> bool {
    let mut words = flags.split('|');
    !words.clone().any(|word| word == "SPIN") || words.any(|word| word == "MUTEX")
}

impl Waits {
    pub fn new(modules: Modules) -> Waits {
        let state = State {
            modules,
            ..State::default()
        };
        Waits {
            text: Text::default(),
            state,
        }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, chunk: &[u8]) {
        self.text.push(chunk, &mut |line| self.state.line(line));
    }

    /// Returns the locks with the longest waits, longest first.
    pub fn finish(mut self, side: Side) -> Vec<LockWait> {
        self.text.end(&mut |line| self.state.line(line));
        let lock = |(name, (waits, seconds))| LockWait {
            name,
            side: side.name().to_owned(),
            waits,
            seconds,
        };
        let mut locks: Vec<LockWait> = self.state.locks.into_iter().map(lock).collect();
        locks.sort_by(|a, b| {
            b.seconds
                .total_cmp(&a.seconds)
                .then_with(|| a.name.cmp(&b.name))
        });
        locks.truncate(MOST_TOLD);
        locks
    }
}

impl State {
    fn line(&mut self, line: &str) {
        if let Some(event) = Event::parse(line) {
            self.close();
            let key = (event.tid, event.cpu.to_owned(), event.lock.to_owned());
            match event.flags {
                Some(flags) => {
                    let begun = Begun {
                        at: event.at,
                        flags: flags.to_owned(),
                        last: flags.to_owned(),
                        caller: None,
                    };
                    self.begun = Some((key, begun));
                }
                None => self.end(&key, event.at),
            }
        } else if line.trim().is_empty() {
            self.close();
        } else if let Some((_, begun)) = &mut self.begun
            && begun.caller.is_none()
        {
            let is_helper = |frame: &String| {
                let symbol = parts(frame).0.trim_start_matches('_');
                HELPERS.iter().any(|helper| symbol.starts_with(helper))
            };
            begun.caller = self.modules.frame(line).filter(|frame| !is_helper(frame));
        }
    }

    /// Records that a wait has begun, or has changed between spinning and sleeping. Other begins
    /// show that the end of the thread's earlier wait was lost: that wait is dropped.
    fn close(&mut self) {
        let Some((key, begun)) = self.begun.take() else {
            return;
        };
        if may_sleep(&begun.last) && key.0 != 0 {
            // The thread waits for nothing else at that time.
            let (tid, lock) = (key.0, &key.2);
            self.open.retain(|open, _| open.0 != tid || open.2 == *lock);
        }
        if let Some(open) = self.open.get_mut(&key) {
            match open.last != begun.last {
                true => open.last = begun.last,
                false => *open = begun,
            }
        } else if self.open.len() < MOST_OPEN {
            self.open.insert(key, begun);
        }
    }

    fn end(&mut self, key: &Key, at: f64) {
        let Some(begun) = self.open.remove(key) else {
            return; // the wait had begun before the recording
        };
        let caller = begun.caller.unwrap_or_else(|| "[unknown]".into());
        let name = format!("{} {caller}", begun.flags);
        if self.locks.len() < MOST_LOCKS || self.locks.contains_key(&name) {
            let (waits, seconds) = self.locks.entry(name).or_default();
            *waits += 1;
            *seconds += (at - begun.at).max(0.0);
        }
    }
}

struct Event<'a> {
    tid: u32,
    /// Empty except for idle tasks: other tasks may move to another CPU while they wait.
    cpu: &'a str,
    /// Seconds.
    at: f64,
    lock: &'a str,
    /// `None` at the end of a wait.
    flags: Option<&'a str>,
}

impl Event<'_> {
    fn parse(line: &str) -> Option<Event<'_>> {
        let (head, event) = line.split_once(" lock:contention_")?;
        let head = Head::parse(head)?;
        let mut words = head.rest.split_whitespace();
        let cpu = words.next()?;
        let at: f64 = words.next()?.trim_end_matches(':').parse().ok()?;
        let (is_begin, rest) = match event.strip_prefix("begin: ") {
            Some(rest) => (true, rest),
            None => (false, event.strip_prefix("end: ")?),
        };
        let mut words = rest.split_whitespace();
        let lock = words.next()?;
        let flags = words.next().unwrap_or_default();
        let flags = flags.trim_start_matches("(flags=").trim_end_matches(')');
        Some(Event {
            tid: head.tid,
            cpu: if head.tid == 0 { cpu } else { "" },
            at: Some(at).filter(|at| (0.0..1e12).contains(at))?,
            lock,
            flags: is_begin.then_some(flags),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use fathom_run::evidence::Evidence;
    use proptest::prelude::*;

    use super::*;
    use crate::perf::OnHost;
    use crate::work::{Shape, Worked};

    const TEXT: &str = "\
fio 250/251 [000] 10.000100: lock:contention_begin: 0xffff8881 (flags=SPIN)
\tffffffff81a0b0c0 __traceiter_contention_begin ([kernel.kallsyms])
\tffffffff81a0b0c0 _raw_spin_lock_irqsave ([kernel.kallsyms])
\tffffffffc0120010 virtio_queue_rq ([kernel.kallsyms])
\tffffffff81a0b1c0 blk_mq_dispatch_rq_list ([kernel.kallsyms])

swapper 0/0 [001] 10.000150: lock:contention_begin: 0xffff8881 (flags=SPIN)
\tffffffff81a0b1c0 other ([kernel.kallsyms])

fio 250/251 [003] 10.000200: lock:contention_begin: 0xffff8881 (flags=MUTEX)

fio 250/251 [003] 10.000300:   lock:contention_end: 0xffff8881 (ret=0)

swapper 0/0 [001] 10.000400: lock:contention_end: 0xffff8881 (ret=0)

fio 250/251 [003] 10.000500: lock:contention_end: 0xffff8882 (ret=0)

";

    fn waits(text: &[u8]) -> Vec<LockWait> {
        let modules = "virtio_blk 28672 1 - Live 0xffffffffc0120000";
        let mut waits = Waits::new(Modules::parse(modules));
        text.chunks(5).for_each(|chunk| waits.push(chunk));
        waits.finish(Side::Guest)
    }

    #[test]
    fn a_wait_is_from_its_begin_to_its_end_by_who_wanted_the_lock() {
        let told = waits(TEXT.as_bytes());
        let told: Vec<_> = { told.iter() }
            .map(|one| (one.name.as_str(), one.waits, (one.seconds * 1e6).round()))
            .collect();
        let expected = [
            ("SPIN other [kernel]", 1, 250.0),
            ("SPIN virtio_queue_rq [virtio_blk.ko]", 1, 200.0),
        ];
        assert_eq!(told, expected);
    }

    /// Returns the text of a begin (with flags) or an end of a wait of thread 251.
    fn at(seconds: &str, lock: &str, flags: Option<&str>) -> String {
        let head = format!("fio 250/251 [000] {seconds}: lock:contention_");
        match flags {
            Some(flags) => format!("{head}begin: {lock} (flags={flags})\n\n"),
            None => format!("{head}end: {lock} (ret=0)\n\n"),
        }
    }

    fn seconds(events: &[(&str, &str, Option<&str>)]) -> Vec<(u64, f64)> {
        let text: String = events
            .iter()
            .map(|&(seconds, lock, flags)| at(seconds, lock, flags))
            .collect();
        let waits = waits(text.as_bytes());
        let waits = waits.iter();
        waits
            .map(|one| (one.waits, (one.seconds * 1e6).round()))
            .collect()
    }

    #[test]
    fn a_lost_end_makes_no_long_wait() {
        const SPIN: Option<&str> = Some("SPIN");
        const MUTEX: Option<&str> = Some("MUTEX");
        const BOTH: Option<&str> = Some("SPIN|MUTEX");
        // The end before the second begin of the same lock is lost.
        for flags in [SPIN, MUTEX, BOTH] {
            let events = [
                ("10.0", "0x1", flags),
                ("19.0", "0x1", flags),
                ("19.00002", "0x1", None),
            ];
            assert_eq!(seconds(&events), [(1, 20.0)], "{flags:?}");
        }
        // A thread that waits for a mutex waits for no other lock: the first end is lost, and so is
        // the begin of the last wait.
        let events = [
            ("10.0", "0x1", MUTEX),
            ("11.0", "0x2", MUTEX),
            ("11.00003", "0x2", None),
            ("19.0", "0x1", None),
        ];
        assert_eq!(seconds(&events), [(1, 30.0)]);
        // An interrupt may spin for another lock meanwhile.
        let events = [
            ("10.0", "0x1", MUTEX),
            ("10.00001", "0x2", SPIN),
            ("10.00002", "0x2", None),
            ("10.00005", "0x1", None),
        ];
        assert_eq!(seconds(&events), [(1, 50.0), (1, 10.0)]);
        // A wait for a mutex that spins, sleeps, and spins again is one wait.
        let events = [
            ("10.0", "0x1", BOTH),
            ("10.00001", "0x1", MUTEX),
            ("10.00003", "0x1", BOTH),
            ("10.00004", "0x1", None),
        ];
        assert_eq!(seconds(&events), [(1, 40.0)]);
    }

    /// Returns the waits of eight threads that write parts of blocks that were not written before.
    /// The lock of a file lets only one such write run at a time.
    fn fought_for(dir: &Path, files: &str) -> Evidence {
        const SHAPE: Shape = Shape {
            threads: 8,
            depth: 1,
        };
        let perf = OnHost::start(dir, &recording()).unwrap();
        let fio = Command::new("fio")
            .args(["--name=load", "--ioengine=psync", "--output-format=json"])
            .arg(format!("--directory={}", dir.display()))
            .arg(files)
            .args(["--rw=randwrite", "--bs=512", "--direct=1", "--size=512M"])
            .args(["--fallocate=truncate", "--time_based", "--runtime=2s"])
            .args(["--thread", "--numjobs=8", "--group_reporting"])
            .output()
            .unwrap();
        assert!(fio.status.success(), "{fio:?}");
        let perf = perf.stop().unwrap();
        let mut waits = Waits::new(Modules::of_host());
        perf.print(&mut |chunk| waits.push(chunk)).unwrap();
        let worked = Worked::of_fio(&String::from_utf8_lossy(&fio.stdout), SHAPE).unwrap();
        Evidence {
            seconds: worked.load.seconds,
            load: worked.load,
            locks: waits.finish(Side::Host),
            ..Evidence::default()
        }
    }

    /// Needs root, and a kernel that traces lock contention.
    #[test]
    fn a_lock_that_is_fought_for_is_named_and_is_what_limits() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let one = fought_for(dir.path(), "--filename=one");
        let verdict = fathom_limiter::judge(&one);
        eprintln!("{verdict}");
        assert_eq!(verdict.rule(), Some("lock"), "{verdict} {:?}", one.locks);
        let each = fought_for(dir.path(), "--filename_format=each$jobnum");
        let (one, each) = (one.load.requests, each.load.requests);
        assert!(each > one * 3 / 2, "{one} to one file, {each} to one each");
    }

    proptest! {
        #[test]
        fn any_text_has_waits_of_finite_time(cuts in proptest::collection::vec((0..TEXT.len(), any::<u8>()), 0..20)) {
            let mut text = TEXT.as_bytes().to_vec();
            for (at, byte) in cuts {
                text[at] = byte;
            }
            for wait in waits(&text) {
                prop_assert!(wait.seconds >= 0.0 && wait.seconds.is_finite());
            }
        }
    }
}
