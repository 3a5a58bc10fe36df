//! Names the objects at addresses of a running process, such as the locks on which its threads
//! wait.
//!
//! Names come from the symbols of the process's mapped files, or from their separate debug files
//! below /usr/lib/debug. Without symbols, an address becomes `MODULE+OFFSET`, which is the same in
//! every run of that program. Memory outside of files is named by its kind.

mod maps;
mod module;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use fathom_run::{Clock, Event, Kind, Stream, StreamInfo, StreamWriter, Thread};

use super::Collected;
use crate::error::{Context, Error, Result};
use maps::{Map, Place};
use module::Module;

/// Name of the stream.
pub const NAME: &str = "symbols";

/// Maximum number of addresses per process, more than the number of locks in a report.
const MAX_ADDRESSES: usize = 1 << 14;
/// System calls futex and futex_wait on x86-64, whose first argument is an address.
const FUTEXES: [u64; 2] = [202, 455];

/// Names the futexes in a round's streams of system calls and writes them to `symbols.events`.
/// `streams` are the names of the streams. The threads' processes must still run; each process that
/// does not adds a problem line.
///
/// # Errors
/// When the streams cannot be read or the names cannot be written.
pub fn collect(round: &Path, streams: &[&str], threads: &[Thread]) -> Result<Collected> {
    let mut addresses: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
    for name in streams {
        gather(&file(round, name), threads, &mut addresses).map_err(run_error)?;
    }
    let mut problems = Vec::new();
    let mut names: BTreeMap<(u32, u64), String> = BTreeMap::new();
    for (pid, addresses) in addresses {
        match Symbols::of(pid) {
            Ok(mut symbols) => {
                let found = addresses.into_iter();
                let found = found.filter_map(|at| Some(((pid, at), symbols.name(at)?)));
                names.extend(found);
            }
            Err(error) => problems.push(format!("locks have no names: {error}")),
        }
    }
    let events = write(&file(round, NAME), &names).map_err(run_error)?;
    let info = StreamInfo {
        name: NAME.to_owned(),
        clock: Clock::HostMonotonic,
        events,
        lost: Some(0),
    };
    Ok(Collected {
        streams: vec![info],
        problems,
    })
}

fn file(round: &Path, name: &str) -> PathBuf {
    round.join(format!("{name}.events"))
}

fn run_error(error: fathom_run::Error) -> Error {
    Error::Io {
        what: "cannot name the locks".into(),
        source: std::io::Error::other(error),
    }
}

/// Collects the addresses of futexes by process.
fn gather(
    path: &Path,
    threads: &[Thread],
    addresses: &mut BTreeMap<u32, BTreeSet<u64>>,
) -> fathom_run::Result<()> {
    let mut owners = Owners::new(threads);
    let mut stream = Stream::open(path)?;
    while let Some(event) = stream.next_event()? {
        let is_futex = event.kind == Kind::SysEnter && FUTEXES.contains(&event.args[0]);
        let Some(pid) = is_futex.then(|| owners.of(event.tid)).flatten() else {
            continue;
        };
        let of_process = addresses.entry(pid).or_default();
        if of_process.len() < MAX_ADDRESSES {
            of_process.insert(event.args[1]);
        }
    }
    Ok(())
}

/// Maps threads to their processes.
struct Owners {
    pids: BTreeSet<u32>,
    of: HashMap<u32, Option<u32>>,
}

impl Owners {
    fn new(threads: &[Thread]) -> Owners {
        Owners {
            pids: threads.iter().map(|thread| thread.pid).collect(),
            of: threads.iter().map(|t| (t.tid, Some(t.pid))).collect(),
        }
    }

    /// Returns the process of a thread. Pool threads may start after the list was made, so unknown
    /// threads are looked up in the listed processes.
    fn of(&mut self, tid: u32) -> Option<u32> {
        let pids = &self.pids;
        let has = |pid: &&u32| Path::new(&format!("/proc/{pid}/task/{tid}")).exists();
        *self
            .of
            .entry(tid)
            .or_insert_with(|| pids.iter().find(has).copied())
    }
}

fn write(path: &Path, names: &BTreeMap<(u32, u64), String>) -> fathom_run::Result<u64> {
    let strings: BTreeSet<&String> = names.values().collect();
    let numbers: HashMap<&String, u64> = strings.iter().copied().zip(0..).collect();
    let strings = strings.into_iter().cloned().collect();
    let mut writer = StreamWriter::create(path, 3, strings)?;
    for ((pid, address), name) in names {
        let args = [u64::from(*pid), *address, numbers[name]];
        writer.push(&Event::new(0, Kind::Symbol, 0, 0, &args))?;
    }
    writer.finish()
}

/// The symbols of one process.
#[derive(Debug)]
pub struct Symbols {
    pid: u32,
    maps: Vec<Map>,
    /// Modules by path; `None` for a file that cannot be parsed as a program.
    modules: HashMap<String, Option<Module>>,
}

impl Symbols {
    /// Reads the memory map of a running process.
    ///
    /// # Errors
    /// When the memory map cannot be read: the process has ended, or belongs to another user.
    pub fn of(pid: u32) -> Result<Symbols> {
        let path = format!("/proc/{pid}/maps");
        let text = std::fs::read_to_string(&path).context(|| format!("cannot read {path}"))?;
        Ok(Symbols {
            pid,
            maps: maps::parse(&text),
            modules: HashMap::new(),
        })
    }

    /// Returns the name of the object at the address, or `None` if the address is not mapped.
    pub fn name(&mut self, address: u64) -> Option<String> {
        match maps::place(&self.maps, address)? {
            Place::File { path, base } => {
                // The path as the process sees it, which may be in another mount namespace.
                let file = format!("/proc/{}/root{path}", self.pid);
                let loaded = self.modules.entry(path.clone());
                let module = loaded.or_insert_with(|| Module::load(Path::new(&file)));
                Some(describe(module.as_ref(), &path, address - base))
            }
            Place::Other { kind, offset } => Some(format!("{kind}+{offset:#x}")),
        }
    }
}

fn describe(module: Option<&Module>, path: &str, offset: u64) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    match module.and_then(|module| module.symbol(offset)) {
        Some((symbol, 0)) => format!("{symbol} ({file})"),
        Some((symbol, inside)) => format!("{symbol}+{inside:#x} ({file})"),
        None => format!("{file}+{offset:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::Role;

    #[used]
    static A_LOCK_OF_THIS_TEST: [u64; 4] = [1; 4];

    #[test]
    fn this_processs_own_symbols_are_found() {
        let mut symbols = Symbols::of(std::process::id()).unwrap();
        let address = A_LOCK_OF_THIS_TEST.as_ptr() as u64;
        let name = symbols.name(address).unwrap();
        assert!(name.contains("A_LOCK_OF_THIS_TEST"), "{name}");
        let name = symbols.name(address + 12).unwrap();
        assert!(
            name.contains("A_LOCK_OF_THIS_TEST") && name.contains("+0xc ("),
            "{name}"
        );
        let on_heap = Box::new(5u64);
        let name = symbols.name(std::ptr::from_ref(&*on_heap) as u64).unwrap();
        assert!(
            name.starts_with("heap+") || name.starts_with("anonymous memory+"),
            "{name}"
        );
        let on_stack = 5u64;
        assert!(symbols.name(std::ptr::from_ref(&on_stack) as u64).is_some());
        assert_eq!(symbols.name(8), None);
        // A function of the C library, found by its dynamic symbols.
        let name = symbols.name(libc::getpid as *const () as u64).unwrap();
        assert!(name.contains("getpid (libc"), "{name}");
    }

    #[test]
    fn futexes_of_a_round_get_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        let address = A_LOCK_OF_THIS_TEST.as_ptr() as u64;
        let mut writer =
            StreamWriter::create(&file(dir.path(), "syscalls"), 5, Vec::new()).unwrap();
        // This thread is not in the list, but belongs to the process.
        let this = rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned();
        let other = address + 8;
        let futexes = [(1, address), (1, address), (2, 8), (this, other)];
        let calls = futexes.map(|(tid, address)| (tid, 202, address));
        for (tid, nr, address) in calls.into_iter().chain([(1, 0, 7)]) {
            let args = [nr, address, 128, 0, 0];
            writer
                .push(&Event::new(5, Kind::SysEnter, 0, tid, &args))
                .unwrap();
        }
        writer.finish().unwrap();
        let thread = |tid, pid| Thread {
            pid,
            tid,
            name: String::new(),
            role: Role::Other,
            vcpu: None,
        };
        // No process has this id: /proc/sys/kernel/pid_max is at most 2^22.
        let threads = [thread(1, pid), thread(2, 1 << 30)];
        let collected = collect(dir.path(), &["syscalls"], &threads).unwrap();
        assert!(collected.problems[0].contains("cannot read /proc/1073741824/maps"));
        let mut stream = Stream::open(&file(dir.path(), NAME)).unwrap();
        let stream_strings = stream.header().strings.clone();
        let event = stream.next_event().unwrap().unwrap();
        assert_eq!(event.args[..2], [u64::from(pid), address]);
        let name = |event: Event| &stream_strings[usize::try_from(event.args[2]).unwrap()];
        assert!(
            name(event).contains("A_LOCK_OF_THIS_TEST"),
            "{}",
            name(event)
        );
        let event = stream.next_event().unwrap().unwrap();
        assert!(name(event).contains("+0x8 ("), "{}", name(event));
        assert_eq!(stream.next_event().unwrap(), None);
    }
}
