//! Which events tell of a request on its way.

use crate::words::words;

/// Bytes of a read.
pub const READ: u64 = 4096;
/// Bytes of a packet: its data, and the headers of UDP, IPv4 and Ethernet.
const PACKET: u64 = 64 + 8 + 20 + 14;

/// A request comes to a disk's scheduler, if it has one, from which somebody else may take it.
const INSERT: &str = "block:block_rq_insert";
/// Behind the device's name then.
pub const SCHEDULER: &str = " scheduler";

words! {
    /// What is handed to devices.
    pub enum Of {
        /// Reads, to block devices.
        Block = "block",
        /// Packets, to network devices.
        Packet = "packet",
    }
}

impl Of {
    /// The events that have their callers with them, and those that have not.
    pub fn events(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Of::Block => (
                &[INSERT, "block:block_rq_issue"],
                &["block:block_rq_complete"],
            ),
            Of::Packet => (&["net:net_dev_start_xmit"], &[]),
        }
    }

    /// The device of a request that is being handed over, and what tells it from others of the
    /// device; `None` if it is not one of those that are followed.
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

    /// The same of a request that is complete.
    pub fn completed(self, event: &str, text: &str) -> Option<(String, String)> {
        if !self.events().1.contains(&event) {
            return None;
        }
        let mut words = text.split_whitespace();
        let (device, sector) = (words.next()?, words.nth(2)?);
        Some((device.to_owned(), sector.to_owned()))
    }
}
