//! Reads /sys/block/NAME/stat (Documentation/block/stat.rst) and the size of the device's queue.

use fathom_run::evidence::DeviceTime;

const SECTOR: u64 = 512;
/// Number of fields up to the time in the queue. Newer kernels add fields for discards and flushes.
const FIELDS: usize = 11;

/// Counters since the device appeared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Number of reads and writes.
    requests: u64,
    sectors: u64,
    /// Time of reads and writes in milliseconds, added up.
    taken: u32,
    /// Time with at least one request in flight, in milliseconds.
    busy: u32,
    /// Time of all requests in milliseconds, added up. The kernel adds a request's time at its end.
    queued: u32,
}

/// Reads a device's counters. Returns `None` if there is no such device.
pub fn read(name: &str) -> Option<Stat> {
    let is_name = !name.contains('/') && !name.starts_with('.');
    let path = format!("/sys/block/{name}/stat");
    parse(&super::read(path).ok().filter(|_| is_name)?)
}

fn parse(text: &str) -> Option<Stat> {
    let mut fields = [0u64; FIELDS];
    let mut words = text.split_ascii_whitespace();
    for field in &mut fields {
        *field = words.next()?.parse().ok()?;
    }
    let [
        reads,
        _,
        read_sectors,
        read_ms,
        writes,
        _,
        written,
        write_ms,
        _,
        busy,
        queued,
    ] = fields;
    // The kernel prints times as 32-bit numbers, which overflow.
    Some(Stat {
        requests: reads.checked_add(writes)?,
        sectors: read_sectors.checked_add(written)?,
        taken: read_ms.wrapping_add(write_ms) as u32,
        busy: busy as u32,
        queued: queued as u32,
    })
}

impl Stat {
    /// Returns the seconds that requests have spent in the queue and the device since `before`,
    /// added up.
    pub fn queued_since(&self, before: &Stat) -> f64 {
        f64::from(self.queued.wrapping_sub(before.queued)) / 1e3
    }
}

/// Returns the device's activity in a window of `seconds`. The caller adds `own_bytes`.
pub fn between(name: &str, before: &Stat, after: &Stat, seconds: f64) -> DeviceTime {
    let requests = after.requests.saturating_sub(before.requests);
    let taken = f64::from(after.taken.wrapping_sub(before.taken)) * 1e6;
    let busy = f64::from(after.busy.wrapping_sub(before.busy)) / 1e3;
    let queue = super::read(format!("/sys/block/{name}/queue/nr_requests")).ok();
    DeviceTime {
        name: name.to_owned(),
        requests,
        bytes: after
            .sectors
            .saturating_sub(before.sectors)
            .saturating_mul(SECTOR),
        utilisation: (busy / seconds * 100.0).min(100.0),
        in_flight: after.queued_since(before) / seconds,
        mean_ns: if requests > 0 {
            taken / requests as f64
        } else {
            0.0
        },
        queue: queue.and_then(|text| text.trim().parse().ok()),
        queues: hardware_queues(name),
        own_bytes: None,
    }
}

/// Returns the number of a device's hardware queues. `None` for devices without them, such as those
/// of the device mapper.
fn hardware_queues(name: &str) -> Option<u32> {
    let queues = std::fs::read_dir(format!("/sys/block/{name}/mq")).ok()?;
    u32::try_from(queues.flatten().count()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const BEFORE: &str = "   47718     7517  3483058    54179    22600    40833 12464168    58978  \
                          0    18812   115060     7453      161  1199216     1651     2416      251";

    fn later(change: impl Fn(&mut [u64])) -> Stat {
        let fields = BEFORE.split_ascii_whitespace();
        let mut fields: Vec<u64> = fields.map(|field| field.parse().unwrap()).collect();
        change(&mut fields);
        let fields: Vec<String> = fields.iter().map(u64::to_string).collect();
        parse(&fields.join(" ")).unwrap()
    }

    #[test]
    fn a_device_has_had_so_much_in_flight() {
        let before = parse(BEFORE).unwrap();
        let after = later(|fields| {
            (fields[0], fields[2], fields[3]) = (57_718, 3_563_058, 64_179);
            (fields[9], fields[10]) = (23_812, 125_060);
        });
        let device = between("vda", &before, &after, 10.0);
        assert_eq!((device.requests, device.bytes), (10_000, 40_960_000));
        assert_eq!(device.mean_ns, 1e6);
        assert_eq!((device.utilisation, device.in_flight), (50.0, 1.0));
    }

    #[test]
    fn times_that_overflow_go_on() {
        let before = later(|fields| fields[10] = (1 << 32) - 1000);
        let after = later(|fields| fields[10] = 4000);
        assert_eq!(after.queued_since(&before), 5.0);
    }

    #[test]
    fn other_texts_and_names_have_none() {
        assert_eq!(parse("1 2 3"), None);
        assert_eq!(parse(&BEFORE.replace("54179", "x")), None);
        assert_eq!(read("../../proc"), None);
        assert_eq!(read("no-such-device"), None);
    }

    #[test]
    fn what_is_written_here_reaches_the_device_below() {
        let mut image = tempfile::Builder::new().tempfile_in(".").unwrap();
        image.write_all(&[7; 65536]).unwrap();
        image.as_file().sync_all().unwrap();
        let name = super::super::device_below(image.path()).unwrap();
        let name = name.expect("this test needs a build on a file system with a block device");
        let before = read(&name).unwrap();
        image.write_all(&vec![8; 4 << 20]).unwrap();
        image.as_file().sync_all().unwrap();
        let device = between(&name, &before, &read(&name).unwrap(), 1.0);
        assert!(device.bytes >= 4 << 20 && device.requests > 0, "{device:?}");
    }
}
