//! The first page of a trace file, which describes the rest.

use super::RECORD;
use crate::clock::{Clock, monotonic_ns};
use std::time::{SystemTime, UNIX_EPOCH};

/// Number of bytes of the header; the first ring follows.
pub(super) const HEADER: usize = 4096;
/// Minimum number of records of a ring. Rings whose size is a power of two from here on fill whole
/// pages.
pub(super) const MIN_CAPACITY: u32 = 128;
pub(super) const MAX_CAPACITY: u32 = 1 << 26;
pub(super) const MAX_RINGS: u32 = 1024;
/// Maximum length of a disk's name, in bytes of UTF-8.
const MAX_NAME: usize = 255;

const MAGIC: &[u8; 8] = b"FATHOMTR";
/// Since version 2 records have a cookie. In older records the cookie's word and kind are 0.
pub(super) const VERSION: u32 = 2;
const OLDEST: u32 = 1;

// Offsets in the header.
pub(super) const AT_VERSION: usize = 8;
pub(super) const AT_RECORD: usize = 12;
const AT_RINGS: usize = 16;
const AT_CAPACITY: usize = 20;
pub(super) const AT_PID: usize = 24;
pub(super) const AT_CLOCK: usize = 28;
/// Offset of the frequency, an f64, which the writer updates. A takeover changes other fields.
pub(super) const AT_HZ: usize = 32;
const AT_TICKS: usize = 40;
const AT_MONOTONIC: usize = 48;
const AT_REALTIME: usize = 56;
const AT_NAME_LEN: usize = 64;
const AT_NAME: usize = 68;

/// Description of a trace file.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Name of the traced disk.
    pub disk: String,
    /// PID of the process that writes the trace.
    pub pid: u32,
    /// Number of rings, one for each worker.
    pub rings: u32,
    /// Number of records in a ring; a power of two.
    pub capacity: u32,
    /// Whether stamps are TSC cycles; otherwise they are nanoseconds of CLOCK_MONOTONIC.
    pub tsc: bool,
    /// Frequency of the stamps' clock, in ticks per second.
    pub hz: f64,
    /// Anchor of the clocks: an instant by the stamps' clock, in ticks.
    pub ticks: u64,
    /// The same instant by CLOCK_MONOTONIC, in nanoseconds.
    pub monotonic_ns: u64,
    /// The same instant by CLOCK_REALTIME, in nanoseconds.
    pub realtime_ns: u64,
}

impl Header {
    /// Creates a header whose anchor is the current time.
    pub(super) fn new(disk: &str, rings: u32, capacity: u32, clock: &Clock) -> Header {
        let pair = clock.pair();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let realtime_now = since_epoch.map_or(0, |d| d.as_nanos() as u64);
        let late = monotonic_ns().saturating_sub(pair.monotonic_ns);
        Header {
            disk: disk.to_owned(),
            pid: std::process::id(),
            rings,
            capacity,
            tsc: clock.is_tsc(),
            hz: clock.hz(),
            ticks: pair.ticks,
            monotonic_ns: pair.monotonic_ns,
            realtime_ns: realtime_now.saturating_sub(late),
        }
    }

    /// Returns the number of bytes in one ring.
    pub(super) fn ring_bytes(&self) -> u64 {
        u64::from(self.capacity) * RECORD as u64
    }

    /// Returns the number of bytes in the whole file.
    pub(super) fn file_bytes(&self) -> u64 {
        HEADER as u64 + u64::from(self.rings) * self.ring_bytes()
    }

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut page = [0; HEADER];
        page[..MAGIC.len()].copy_from_slice(MAGIC);
        let name = shortened(&self.disk);
        for (at, value) in [
            (AT_VERSION, VERSION),
            (AT_RECORD, RECORD as u32),
            (AT_RINGS, self.rings),
            (AT_CAPACITY, self.capacity),
            (AT_PID, self.pid),
            (AT_CLOCK, u32::from(self.tsc)),
            (AT_NAME_LEN, name.len() as u32),
        ] {
            page[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        for (at, value) in [
            (AT_HZ, self.hz.to_bits()),
            (AT_TICKS, self.ticks),
            (AT_MONOTONIC, self.monotonic_ns),
            (AT_REALTIME, self.realtime_ns),
        ] {
            page[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        }
        page[AT_NAME..AT_NAME + name.len()].copy_from_slice(name.as_bytes());
        page
    }

    /// Decodes and checks a header. The error says what is wrong with it.
    pub(super) fn decode(page: &[u8; HEADER]) -> Result<Header, String> {
        if !has_magic(page) {
            return Err("not a trace of fathom".into());
        }
        let (version, record) = (u32_at(page, AT_VERSION), u32_at(page, AT_RECORD));
        if !(OLDEST..=VERSION).contains(&version) || record as usize != RECORD {
            return Err(format!(
                "the trace has format {version} with records of {record} bytes, and this program \
                 reads formats {OLDEST} to {VERSION} with {RECORD} bytes"
            ));
        }
        let header = Header {
            disk: name(page)?,
            pid: u32_at(page, AT_PID),
            rings: u32_at(page, AT_RINGS),
            capacity: u32_at(page, AT_CAPACITY),
            tsc: match u32_at(page, AT_CLOCK) {
                0 => false,
                1 => true,
                other => return Err(corrupt("clock", other)),
            },
            hz: f64::from_bits(u64_at(page, AT_HZ)),
            ticks: u64_at(page, AT_TICKS),
            monotonic_ns: u64_at(page, AT_MONOTONIC),
            realtime_ns: u64_at(page, AT_REALTIME),
        };
        header.check()?;
        Ok(header)
    }

    /// Checks the values from which sizes and times are computed.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(1..=MAX_RINGS).contains(&self.rings) {
            return Err(corrupt("number of rings", self.rings));
        }
        let sizes = MIN_CAPACITY..=MAX_CAPACITY;
        if !sizes.contains(&self.capacity) || !self.capacity.is_power_of_two() {
            return Err(corrupt("ring size", self.capacity));
        }
        if !(1e6..=1e11).contains(&self.hz) {
            return Err(corrupt("clock frequency", self.hz));
        }
        Ok(())
    }

    /// Converts a stamp to nanoseconds of CLOCK_MONOTONIC. A stamp from before that clock's start
    /// is 0.
    pub fn monotonic(&self, stamp: u64) -> u64 {
        self.monotonic_ns.saturating_add_signed(self.since(stamp))
    }

    /// Converts a stamp to nanoseconds since 1970.
    pub fn realtime(&self, stamp: u64) -> u64 {
        self.realtime_ns.saturating_add_signed(self.since(stamp))
    }

    /// Converts ticks to nanoseconds.
    pub fn ns(&self, ticks: u64) -> f64 {
        ticks as f64 * 1e9 / self.hz
    }

    /// Returns the time from the anchor to `stamp`, in nanoseconds.
    fn since(&self, stamp: u64) -> i64 {
        let ticks = i128::from(stamp) - i128::from(self.ticks);
        (ticks as f64 * 1e9 / self.hz) as i64
    }
}

/// Returns whether a file that starts with these bytes is a trace.
pub(super) fn has_magic(start: &[u8]) -> bool {
    start.starts_with(MAGIC)
}

fn corrupt(what: &str, value: impl std::fmt::Display) -> String {
    format!("the trace is damaged: its {what} is {value}")
}

fn shortened(name: &str) -> &str {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

/// Returns the disk's name with its control characters replaced, so that it can be printed on a
/// terminal.
fn name(page: &[u8; HEADER]) -> Result<String, String> {
    let len = u32_at(page, AT_NAME_LEN);
    if len as usize > MAX_NAME {
        return Err(corrupt("name's length", len));
    }
    let text = String::from_utf8_lossy(&page[AT_NAME..AT_NAME + len as usize]);
    Ok(text.replace(char::is_control, "?"))
}

fn u32_at(page: &[u8; HEADER], at: usize) -> u32 {
    u32::from_ne_bytes(page[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(page: &[u8; HEADER], at: usize) -> u64 {
    u64::from_ne_bytes(page[at..at + 8].try_into().expect("eight bytes"))
}
