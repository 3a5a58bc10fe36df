//! The changes that can be made while a disk is in use.

use fathom_units::short_size;

/// Size of the reads of the filter `readahead`, in the syntax of its option.
const READAHEAD: &str = "readahead:size=1M";

/// A change of one option of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Removes the limits of a throttle filter.
    Throttle {
        /// Position of the filter in the list of the disk's filters.
        index: usize,
        /// Name of the filter in commands: `throttle`, or `throttle#2`.
        filter: String,
        /// Options of the filter that limit requests.
        limits: Vec<String>,
    },
    /// Gives the disk this number of threads.
    Threads(u16),
    /// Lets the threads run on any CPU.
    AnyCpu,
    /// Gives a disk of a pool threads of its own.
    OwnThreads,
    /// Lets the threads of another pool serve the disk.
    Pool(String),
    /// Sets the memory limit of the cache of tables, in bytes.
    TableCache(u64),
    /// Does I/O by io_uring.
    IoUring,
    /// Polls while polling saves time.
    PollAuto,
    /// Adds the filter `readahead`, next to the image. The disk has these filters, as the command
    /// line has them.
    Readahead {
        /// The present filters.
        filters: Vec<String>,
    },
}

impl Change {
    /// Returns the option that changes, by its key in the API and in configurations.
    pub fn option(&self) -> &'static str {
        match self {
            Change::Throttle { .. } | Change::Readahead { .. } => "filters",
            Change::Threads(_) => "iothreads",
            Change::AnyCpu => "cpus",
            Change::OwnThreads | Change::Pool(_) => "pool",
            Change::TableCache(_) => "metadata-cache",
            Change::IoUring => "aio",
            Change::PollAuto => "poll",
        }
    }

    /// Returns the filter that is added, as the command line has it.
    pub fn added_filter(&self) -> Option<&'static str> {
        matches!(self, Change::Readahead { .. }).then_some(READAHEAD)
    }

    /// Describes the change, as an order.
    pub fn title(&self) -> String {
        match self {
            Change::Throttle { filter, .. } => format!("remove the limits of the filter {filter}"),
            Change::Threads(count) => format!("serve the disk with {count} threads"),
            Change::AnyCpu => "let the threads run on any CPU".to_owned(),
            Change::OwnThreads => "give the disk a thread of its own".to_owned(),
            Change::Pool(pool) => format!("serve the disk with the threads of pool {pool}"),
            Change::TableCache(bytes) => {
                format!(
                    "keep {} of the image's tables in memory",
                    short_size(*bytes)
                )
            }
            Change::IoUring => "do I/O by io_uring".to_owned(),
            Change::PollAuto => "poll for requests while that saves time".to_owned(),
            Change::Readahead { .. } => "read ahead of sequential reads".to_owned(),
        }
    }

    /// Describes what the change costs.
    pub fn price(&self) -> String {
        match self {
            Change::Throttle { .. } => {
                "the disk may take all that its storage can do, and other disks there get less"
                    .to_owned()
            }
            Change::Threads(count) => {
                format!("CPU time: up to {count} CPUs while the disk is busy")
            }
            Change::AnyCpu => {
                "CPU time of other CPUs, also of those on which virtual machines run".to_owned()
            }
            Change::OwnThreads => "CPU time: up to one more CPU while the disk is busy".to_owned(),
            Change::Pool(pool) => format!("the other disks of pool {pool} get less CPU time"),
            Change::TableCache(bytes) => format!("memory: up to {}", short_size(*bytes)),
            Change::IoUring => "none; if the kernel permits no io_uring, the server refuses the \
                                change"
                .to_owned(),
            Change::PollAuto => {
                "CPU time: each thread polls for at most 900 ms of a second".to_owned()
            }
            Change::Readahead { .. } => {
                "memory: up to 16M for each thread; the storage reads data \
                                         that the guest may not need"
                    .to_owned()
            }
        }
    }

    /// Returns the command that makes the change for the disk of this name.
    pub fn command(&self, disk: &str) -> String {
        let change = |text: &str| format!("fathom disk change {disk} {text}");
        match self {
            Change::Throttle { filter, limits, .. } => {
                let limits: Vec<_> = limits.iter().map(|limit| format!("{limit}=")).collect();
                format!("fathom set {disk} {filter} {}", limits.join(" "))
            }
            Change::Threads(count) => change(&format!("iothreads={count}")),
            Change::AnyCpu => change("cpus="),
            Change::OwnThreads => change("pool="),
            Change::Pool(pool) => change(&format!("pool={pool}")),
            Change::TableCache(bytes) => change(&format!("metadata-cache={}", short_size(*bytes))),
            Change::IoUring => change("aio=io_uring"),
            Change::PollAuto => change("poll=auto"),
            Change::Readahead { filters } => {
                let all = filters.iter().map(String::as_str).chain([READAHEAD]);
                let all: Vec<_> = all.map(json_text).collect();
                change(&quoted(&format!("filters=[{}]", all.join(","))))
            }
        }
    }
}

/// Returns a text in JSON. The text of a filter has no control characters.
fn json_text(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Returns a text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
