//! Events that report the progress of a request.

use crate::words::words;

/// Size of a read, in bytes.
pub const READ: u64 = 4096;
/// Size of a packet in bytes: its data, and the headers of UDP, IPv4 and Ethernet.
const PACKET: u64 = 64 + 8 + 20 + 14;

/// Event of a request that gets to a disk's scheduler. Another thread may take it from there.
const INSERT: &str = "block:block_rq_insert";
/// Suffix of the device's name for requests that are in its scheduler.
pub const SCHEDULER: &str = " scheduler";

words! {
    /// Kind of requests.
    pub enum Of {
        /// Reads that are handed to block devices.
        Block = "block",
        /// Packets that are handed to network devices.
        Packet = "packet",
    }
}

impl Of {
    /// Returns the events that are recorded with their callers, and those without.
    pub fn events(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Of::Block => (
                &[INSERT, "block:block_rq_issue"],
                &["block:block_rq_complete"],
            ),
            Of::Packet => (&["net:net_dev_start_xmit"], &[]),
        }
    }

    /// Returns the device to which a request is handed, and a number that identifies the request on
    /// the device. `None` if the request is not followed.
    pub fn handed(self, event: &str, text: &str) -> Option<(String, String)> {
        if !self.events().0.contains(&event) {
            return None;
        }
        let mut words = text.split_whitespace();
        match self {
            Of::Block => {
                let (device, kind) = (words.next()?, words.next()?);
                let is_ours = matches!(kind, "R" | "RS") && words.next()?.parse() == Ok(READ);
                let sector = words.nth(1)?;
                let device = match event {
                    INSERT => format!("{device}{SCHEDULER}"),
                    _ => device.to_owned(),
                };
                is_ours.then(|| (device, sector.to_owned()))
            }
            Of::Packet => {
                let device = words.next()?.strip_prefix("dev=")?;
                let length = words.find_map(|word| word.strip_prefix("len="))?;
                (length.parse() == Ok(PACKET)).then(|| (device.to_owned(), String::new()))
            }
        }
    }

    /// Returns the same for a request that is complete.
    pub fn completed(self, event: &str, text: &str) -> Option<(String, String)> {
        if !self.events().1.contains(&event) {
            return None;
        }
        let mut words = text.split_whitespace();
        let (device, sector) = (words.next()?, words.nth(2)?);
        Some((device.to_owned(), sector.to_owned()))
    }
}
