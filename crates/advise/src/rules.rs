//! The rules: each derives changes from the evidence, or none.

use crate::advice::Advice;
use crate::change::Change;
use crate::evidence::{
    Engine, Evidence, Filter, OwnThreads, Polling, SharedThreads, Storage, Tables, Threads, Verdict,
};
use std::time::Duration;

/// A rule.
pub type Rule = fn(&Evidence) -> Vec<Advice>;

/// All rules, the most promising first.
pub static RULES: &[Rule] = &[throttle, pool, threads, tables, readahead, engine, polling];

/// Minimum share of the window in which a throttle holds requests back, if it is the limit.
const NOTICEABLE: f64 = 0.10;
/// CPU share from which pinned CPUs count as used up.
const SATURATED: f64 = 0.95;
/// Largest CPU share of the busiest thread of a pool that can take another disk.
const HALF: f64 = 0.50;
/// Minimum share of the requests of other disks, if they take the pool's threads away.
const GREEDY: f64 = 0.50;
/// Maximum number of threads of a disk.
const MOST_THREADS: u16 = 256;
/// Minimum number of reads of tables for each request, if the cache is too small.
const TABLE_READS: f64 = 0.05;
/// Minimum share of the lookups in a request's time.
const LOOKUPS: f64 = 0.20;
/// Bytes of a disk for each byte of its tables, with clusters of 64 KiB.
const DISK_OF_TABLES: u64 = 8192;
/// Factor by which a cache grows that is large enough for clusters of 64 KiB, and yet too small.
const GROWTH: u64 = 4;
/// Part of the free memory that a cache may take.
const PART_OF_MEMORY: u64 = 4;
const MIB: u64 = 1 << 20;
/// Minimum share of reads, and of reads that follow another one, if the load reads sequentially.
const MOSTLY: f64 = 0.90;
/// Largest number of requests in flight of a load that waits for its reads.
const FEW: f64 = 4.0;
/// Minimum share of the storage in a request's time, if the storage is slow.
const MOST: f64 = 0.50;
/// Longest time that `auto` polls at a time: the longest wake-up that polling can save.
const WAKE_UP: Duration = Duration::from_micros(50);
/// Minimum part of a request's time that wake-ups may take, if polling is worth trying.
const WORTHWHILE: f64 = 0.10;
/// Share of the storage in a request's time from which the storage is the limit. The rule `device`
/// of experiments has the same value.
const DEVICE: f64 = 0.80;

fn one(change: Change, why: String) -> Vec<Advice> {
    vec![Advice { change, why }]
}

/// Formats a share.
fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Returns true if the requests spend their time in the storage.
pub fn is_storage_bound(evidence: &Evidence) -> bool {
    evidence.verdict == Verdict::Latency && evidence.device >= DEVICE
}

/// Returns the names of the limits of a throttle filter that is not in a group. The limits of a
/// group are those of other disks, too.
fn limits(filter: &Filter) -> Vec<String> {
    let is_group = filter.options.iter().any(|(name, _)| name == "group");
    let is_limit = |name: &str| {
        let kind = [
            "iops-total",
            "iops-read",
            "iops-write",
            "bps-total",
            "bps-read",
            "bps-write",
        ];
        kind.iter().any(|kind| name.starts_with(kind))
    };
    let names = filter.options.iter().map(|(name, _)| name);
    match filter.name == "throttle" && !is_group {
        true => names.filter(|name| is_limit(name)).cloned().collect(),
        false => Vec::new(),
    }
}

/// A throttle that was meant for another time holds the requests back.
fn throttle(evidence: &Evidence) -> Vec<Advice> {
    if evidence.verdict != Verdict::Filter {
        return Vec::new();
    }
    let is_throttle = |filter: &&Filter| filter.name == "throttle";
    let is_only = evidence.filters.iter().filter(is_throttle).count() == 1;
    let mut number = 0;
    let mut found = Vec::new();
    let all = evidence.filters.iter().enumerate();
    for (index, filter) in all.filter(|(_, one)| is_throttle(one)) {
        number += 1;
        let limits = limits(filter);
        let held = filter.held.unwrap_or(1.0);
        if limits.is_empty() || held < NOTICEABLE {
            continue;
        }
        let name = match is_only {
            true => "throttle".to_owned(),
            false => format!("throttle#{number}"),
        };
        let why = match filter.held {
            Some(held) => format!(
                "the filter held requests back for {} of the time",
                percent(held)
            ),
            None => "the filter holds requests back".to_owned(),
        };
        let change = Change::Throttle {
            index,
            filter: name,
            limits,
        };
        found.push(Advice { change, why });
    }
    found
}

/// Other disks of the pool keep its threads busy.
fn pool(evidence: &Evidence) -> Vec<Advice> {
    let Threads::Shared(shared) = &evidence.threads else {
        return Vec::new();
    };
    if evidence.verdict != Verdict::Thread || shared.others < GREEDY {
        return Vec::new();
    }
    let why = neighbours(shared);
    let mut found = Vec::new();
    let idle = shared.pools.iter().filter(|pool| pool.cpu < HALF);
    if let Some(idle) = idle.min_by(|one, other| one.cpu.total_cmp(&other.cpu)) {
        let text = format!(
            "{why}; the busiest thread of pool {} works {}",
            idle.name,
            percent(idle.cpu)
        );
        found.extend(one(Change::Pool(idle.name.clone()), text));
    }
    if evidence.host.has_free_cpu() {
        let text = format!(
            "{why}; {:.1} CPUs of the host are free",
            evidence.host.free_cpus
        );
        found.extend(one(Change::OwnThreads, text));
    }
    found
}

fn neighbours(shared: &SharedThreads) -> String {
    let share = percent(shared.others);
    let by = { shared.busiest.as_ref() }
        .map_or(String::new(), |name| format!(", most of them '{name}'"));
    format!(
        "other disks make {share} of the requests of pool {}{by}",
        shared.pool
    )
}

/// The disk's own threads have work all the time, or share too few CPUs.
fn threads(evidence: &Evidence) -> Vec<Advice> {
    let Threads::Own(own) = &evidence.threads else {
        return Vec::new();
    };
    let free = evidence.host.free_cpus;
    // (Threads that share a CPU are not busy one by one.)
    let is_slow = matches!(evidence.verdict, Verdict::Thread | Verdict::Latency);
    if !is_slow || !evidence.host.has_free_cpu() {
        return Vec::new();
    }
    let is_full = |&pinned: &u16| own.cpu >= SATURATED * f64::from(pinned) && pinned < own.count;
    if let Some(pinned) = own.pinned.filter(is_full) {
        let why = format!(
            "{} threads share {pinned} pinned CPUs, and {free:.1} CPUs of the host are free",
            own.count
        );
        return one(Change::AnyCpu, why);
    }
    match evidence.verdict {
        Verdict::Thread => more_threads(own, free),
        _ => Vec::new(),
    }
}

fn more_threads(own: &OwnThreads, free: f64) -> Vec<Advice> {
    // (The value is from 1 to 256.)
    let more = free.min(f64::from(MOST_THREADS)) as u16;
    let most = own.pinned.unwrap_or(MOST_THREADS).min(MOST_THREADS);
    let count = own.sources.min(own.count.saturating_add(more)).min(most);
    let why = format!(
        "{} queues and connections have requests for {} threads, and {free:.1} CPUs of the host are \
         free",
        own.sources, own.count
    );
    match count > own.count {
        true => one(Change::Threads(count), why),
        false => Vec::new(),
    }
}

/// The tables of the image do not fit into their cache.
fn tables(evidence: &Evidence) -> Vec<Advice> {
    let looks_up = match evidence.verdict {
        Verdict::Tables => true,
        Verdict::Latency => evidence.map >= LOOKUPS,
        _ => false,
    };
    let is_too_small = |tables: &Tables| looks_up && tables.reads >= TABLE_READS;
    let Some(tables) = evidence.tables.filter(is_too_small) else {
        return Vec::new();
    };
    let wanted = cache_for(evidence, tables);
    let why = format!(
        "lookups take {} of the requests' time, with {:.2} reads of tables for each request",
        percent(evidence.map),
        tables.reads
    );
    match wanted > tables.cache {
        true => one(Change::TableCache(wanted), why),
        false => Vec::new(),
    }
}

/// Returns the size of a cache for all tables of the disk, in whole MiB, as far as memory permits.
fn cache_for(evidence: &Evidence, tables: Tables) -> u64 {
    let all = evidence.size.div_ceil(DISK_OF_TABLES);
    let wanted = match all > tables.cache {
        true => all,
        false => tables.cache.saturating_mul(GROWTH),
    };
    let most = evidence.host.free_memory / PART_OF_MEMORY / MIB * MIB;
    wanted.div_ceil(MIB).saturating_mul(MIB).min(most)
}

/// Sequential reads wait for a remote server, one after the other.
fn readahead(evidence: &Evidence) -> Vec<Advice> {
    let is_sequential = evidence.forward.is_some_and(|forward| forward >= MOSTLY);
    let is_slow = evidence.storage == Storage::Server && evidence.device >= MOST;
    let mut filters = evidence.filters.iter();
    let reads_ahead = filters.any(|filter| filter.name == "readahead");
    if evidence.verdict != Verdict::Latency
        || evidence.reads < MOSTLY
        || evidence.in_flight > FEW
        || !is_sequential
        || !is_slow
        || reads_ahead
    {
        return Vec::new();
    }
    let why = format!(
        "the reads are sequential, {:.1} are in flight, and the storage takes {:.0} us for each",
        evidence.in_flight,
        evidence.mean_us * evidence.device
    );
    let filters = evidence.filters.iter().map(|one| one.text.clone());
    let filters = filters.collect();
    one(Change::Readahead { filters }, why)
}

/// Threads that make blocking system calls do what the kernel does without them.
fn engine(evidence: &Evidence) -> Vec<Advice> {
    let is_slow = matches!(evidence.verdict, Verdict::Thread | Verdict::Latency);
    let Threads::Own(own) = &evidence.threads else {
        return Vec::new();
    };
    if !is_slow || own.engine != Engine::Threads || evidence.storage != Storage::File {
        return Vec::new();
    }
    let why = "each request passes through another thread, which makes a blocking system call";
    one(Change::IoUring, why.to_owned())
}

/// The thread sleeps before each step of a short request.
fn polling(evidence: &Evidence) -> Vec<Advice> {
    let Threads::Own(own) = &evidence.threads else {
        return Vec::new();
    };
    let polls_less = match own.polling {
        Polling::Off => true,
        Polling::Fixed(time) => time < WAKE_UP,
        Polling::Auto => false,
    };
    let wake_ups_us = own.sleeps * WAKE_UP.as_secs_f64() * 1e6;
    let is_worthwhile = wake_ups_us >= WORTHWHILE * evidence.mean_us;
    let is_possible = polls_less && evidence.host.has_free_cpu();
    if evidence.verdict != Verdict::Latency || !is_possible || !is_worthwhile {
        return Vec::new();
    }
    let why = format!(
        "a thread sleeps {:.1} times for each request of {:.0} us, and each time must be woken",
        own.sleeps, evidence.mean_us
    );
    one(Change::PollAuto, why)
}
