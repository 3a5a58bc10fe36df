//! A trace instance of this process.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, flock};

use super::probes;
use super::sweep;
use super::{PREFIX, Tracefs, get, put};
use crate::error::{Context, Error, Result};
use crate::tracers::ftrace::Format;

/// The clock by which an instance stamps its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceClock {
    /// The raw time stamp counter.
    Tsc,
    /// CLOCK_MONOTONIC in nanoseconds.
    Monotonic,
}

impl TraceClock {
    /// Returns the kernel's name of the clock.
    pub fn name(self) -> &'static str {
        match self {
            TraceClock::Tsc => "x86-tsc",
            TraceClock::Monotonic => "mono",
        }
    }
}

/// Statistics of one CPU's buffer (`per_cpu/cpuN/stats`), as numbers of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Events that can still be read.
    pub entries: u64,
    /// Events that were overwritten before they were read.
    pub overrun: u64,
    /// Events that were lost because nested interrupts filled the buffer.
    pub commit_overrun: u64,
    /// Events that a full buffer rejected because it does not overwrite.
    pub dropped: u64,
}

impl Stats {
    fn parse(text: &str) -> Stats {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.strip_prefix(':')?.trim().parse().ok())
                .unwrap_or(0)
        };
        Stats {
            entries: value("entries"),
            overrun: value("overrun"),
            commit_overrun: value("commit overrun"),
            dropped: value("dropped events"),
        }
    }

    /// Returns the number of events that can never be read.
    pub fn lost(&self) -> u64 {
        self.overrun + self.commit_overrun + self.dropped
    }
}

/// A trace instance with its own buffers, events and filters. Tracing is off until
/// [`Instance::on`]. On drop, the instance and its probes are removed.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    /// Name of the directory, and of the group of the instance's probes.
    name: String,
    probes: Vec<String>,
    /// The open directory, locked while this value lives.
    lock: Option<File>,
    tracefs: Tracefs,
}

impl Instance {
    pub(super) fn create(tracefs: Tracefs, label: &str) -> Result<Instance> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("{PREFIX}_{}_{number}_{label}", std::process::id());
            let path = tracefs.root().join("instances").join(&name);
            match fs::create_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.context(|| format!("cannot make a trace instance ({name})"))?,
            }
            let Some(lock) = lock(&path) else {
                continue; // another run's sweep took the lock first
            };
            sweep::remember(&path);
            let instance = Instance {
                path,
                name,
                probes: Vec::new(),
                lock: Some(lock),
                tracefs,
            };
            instance.put("tracing_on", "0")?;
            return Ok(instance);
        }
    }

    /// Returns the file system to which the instance belongs.
    pub fn tracefs(&self) -> &Tracefs {
        &self.tracefs
    }

    /// Returns the instance's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Starts or continues tracing.
    ///
    /// # Errors
    /// When the kernel rejects it.
    pub fn on(&self) -> Result<()> {
        self.put("tracing_on", "1")
    }

    /// Stops tracing. Recorded events stay in the buffers.
    ///
    /// # Errors
    /// When the kernel rejects it.
    pub fn off(&self) -> Result<()> {
        self.put("tracing_on", "0")
    }

    /// Sets the clock to the time stamp counter, or to CLOCK_MONOTONIC if the kernel does not offer
    /// the counter. Empties the buffers.
    ///
    /// # Errors
    /// When the kernel accepts neither clock.
    pub fn set_clock(&self) -> Result<TraceClock> {
        let clock = TraceClock::Tsc;
        if cfg!(target_arch = "x86_64") && self.put("trace_clock", clock.name()).is_ok() {
            return Ok(clock);
        }
        let clock = TraceClock::Monotonic;
        self.put("trace_clock", clock.name()).map(|()| clock)
    }

    /// Sets the size of each CPU's buffer in KiB.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn set_buffer(&self, kib_per_cpu: u32) -> Result<()> {
        self.put("buffer_size_kb", &kib_per_cpu.to_string())
            .map_err(|error| match error {
                Error::Io { source, .. } if source.raw_os_error() == Some(12) => {
                    Error::Protocol(format!(
                        "no memory for trace buffers of {kib_per_cpu} KiB a CPU: choose smaller ones"
                    ))
                }
                other => other,
            })
    }

    /// Sets a trace option of the instance, such as `overwrite`.
    ///
    /// # Errors
    /// When the kernel has no such option.
    pub fn set_option(&self, option: &str, on: bool) -> Result<()> {
        self.put(&format!("options/{option}"), if on { "1" } else { "0" })
    }

    /// Enables an event (`kvm/kvm_exit`), limited to records that pass the filter
    /// (Documentation/trace/events.rst, "Event filtering").
    ///
    /// # Errors
    /// When the kernel has no such event or the filter does not match its fields.
    pub fn enable(&self, event: &str, filter: Option<&str>) -> Result<Format> {
        let format = self.tracefs.format(event)?;
        if let Some(filter) = filter {
            self.put(&format!("events/{event}/filter"), filter)?;
        }
        self.put(&format!("events/{event}/enable"), "1")?;
        Ok(format)
    }

    /// Probes the entry of a kernel function and enables the probe. `arguments` have the syntax of
    /// kprobe_events (Documentation/trace/kprobetrace.rst): `vq=%di`. The probe is removed on drop.
    ///
    /// # Errors
    /// When the function cannot be probed.
    pub fn kprobe(&mut self, function: &str, arguments: &str) -> Result<Format> {
        let group = &self.name;
        probes::add(self.tracefs.root(), group, function, arguments)
            .context(|| format!("cannot probe {function}"))?;
        self.probes.push(function.to_owned());
        self.enable(&format!("{}/{function}", self.name), None)
    }

    /// Traces calls of those functions that the function tracer knows.
    ///
    /// # Errors
    /// When the kernel has no function tracer, does not let its function filter be changed, or
    /// knows none of the functions.
    pub fn trace_functions(&self, functions: &[&str]) -> Result<Format> {
        if !self.tracefs.has_tracer("function") {
            return Err(Error::Missing {
                what: "the kernel's function tracer".into(),
                hint: "the kernel needs CONFIG_FUNCTION_TRACER and CONFIG_DYNAMIC_FTRACE",
            });
        }
        let set = |name: &&&str| self.put("set_ftrace_filter", &format!("{name}\n")).is_ok();
        if functions.iter().filter(set).count() == 0 {
            return Err(Error::Protocol(format!(
                "the function tracer takes none of {}: they are not there, or its list is closed",
                functions.join(", ")
            )));
        }
        self.put("current_tracer", "function")?;
        self.tracefs.format("ftrace/function")
    }

    /// Limits events to these threads and the threads that they start from now on.
    ///
    /// # Errors
    /// When there are no threads, for which the kernel would set no limit, or when the kernel
    /// rejects it.
    pub fn only_threads(&self, tids: &[u32]) -> Result<()> {
        if tids.is_empty() {
            return Err(Error::Protocol("there are no threads to trace".into()));
        }
        self.set_option("event-fork", true)?;
        // Each write has one thread id, because a list longer than a page would be cut.
        for tid in tids {
            self.put("set_event_pid", &format!("{tid}\n"))?;
        }
        Ok(())
    }

    /// Returns the CPUs that have a buffer.
    pub fn cpus(&self) -> Vec<u16> {
        let entries = fs::read_dir(self.path.join("per_cpu"))
            .into_iter()
            .flatten();
        let number = |entry: io::Result<fs::DirEntry>| {
            entry
                .ok()?
                .file_name()
                .to_str()?
                .strip_prefix("cpu")?
                .parse()
                .ok()
        };
        let mut cpus: Vec<u16> = entries.filter_map(number).collect();
        cpus.sort_unstable();
        cpus
    }

    /// Returns the sum of all CPUs' buffer statistics.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        for cpu in self.cpus() {
            let path = self.path.join(format!("per_cpu/cpu{cpu}/stats"));
            let stats = Stats::parse(&get(&path).unwrap_or_default());
            sum.entries += stats.entries;
            sum.overrun += stats.overrun;
            sum.commit_overrun += stats.commit_overrun;
            sum.dropped += stats.dropped;
        }
        sum
    }

    /// Returns the content of the buffers as text. The buffers keep it.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn text(&self) -> Result<String> {
        let path = self.path.join("trace");
        get(&path).context(|| format!("cannot read {}", path.display()))
    }

    /// Opens a CPU's buffer for non-blocking reads of whole pages.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn raw(&self, cpu: u16) -> Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.path.join(format!("per_cpu/cpu{cpu}/trace_pipe_raw"));
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&path)
            .context(|| format!("cannot open {}", path.display()))
    }

    fn put(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path.join(file);
        put(&path, text).context(|| format!("cannot write '{}' to {}", text.trim(), path.display()))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        sweep::remove(self.tracefs.root(), &self.path, &self.name);
        sweep::forget(&self.path);
        drop(self.lock.take());
    }
}

/// Locks an instance's directory. Returns `None` if another process holds the lock or the directory
/// no longer exists.
pub(super) fn lock(path: &Path) -> Option<File> {
    let dir = File::open(path).ok()?;
    flock(&dir, FlockOperation::NonBlockingLockExclusive).ok()?;
    path.is_dir().then_some(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_lose_events_counts() {
        let text = "entries: 12\noverrun: 3\ncommit overrun: 1\nbytes: 99\n\
                    oldest event ts:  5.1\nnow ts: 6.0\ndropped events: 4\nread events: 2\n";
        let stats = Stats::parse(text);
        assert_eq!((stats.entries, stats.lost()), (12, 8));
        assert_eq!(Stats::parse("").lost(), 0);
    }
}
