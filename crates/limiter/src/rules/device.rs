//! A device at its limit: it holds all requests of the load all the time, and is no faster without
//! the stack.

use fathom_run::evidence::{DeviceTime, Evidence};

use crate::device_part::{DevicePart, device_in_flight, device_part, parts};
use crate::figures::{load_in_flight, name, number, offered, percent, ratio};
use crate::rule::Finding;

/// Minimum share of the offered requests that are in flight, and of a queue's room that is used;
/// the load needs a moment between two requests.
const PINNED: f64 = 0.90;
/// Minimum share of a request's time that is spent in the device. A fast stack adds less than a
/// fifth to a device at depth; if more time is spent elsewhere, the device is not the limit.
const NEARLY_ALL: f64 = 0.80;
/// Minimum share of the bare device's rate at the same depth. Repeated runs of one device differ by
/// less.
const AS_FAST: f64 = 0.90;

/// Holds if the load keeps its requests in flight, and they spend their time in the device:
///
/// ```text
/// in flight          >= 0.9 * offered     [requests, over the load's own seconds]
/// device's share     >= 0.8               [of a request's mean time, see `device_part`]
/// rate / bare device >= 0.9               [requests per second; if it was measured]
/// ```
///
/// The rule also holds if the device's queues are full (see `queue_full`). If the device's I/O is
/// mostly not the load's, the part of the load is unknown.
pub fn at_its_limit(evidence: &Evidence) -> Option<Finding> {
    let device = evidence.device.as_ref()?;
    if device_part(evidence) == DevicePart::Mixed {
        return Some(mixed(evidence, device));
    }
    // A single request in flight is always all that is offered; the latency rule covers it.
    let offered = offered(&evidence.load).filter(|&offered| offered > 1.0)?;
    match queue_full(evidence, device, offered) {
        Some(finding) if finding.holds() => Some(finding),
        queue => of_time(evidence, device, offered).or(queue),
    }
}

fn of_time(evidence: &Evidence, device: &DeviceTime, offered: f64) -> Option<Finding> {
    let DevicePart::Is(time) = device_part(evidence) else {
        return None;
    };
    if load_in_flight(evidence)? < PINNED * offered || time < NEARLY_ALL {
        return None;
    }
    let seen = format!(
        "device {}: {} of {} in flight, {} of the request's time",
        name(&device.name),
        number(device_in_flight(evidence)?.min(offered)),
        number(offered),
        percent(time)
    );
    let finding = match of_bare(evidence) {
        Some(rate) if rate < AS_FAST => Finding::weak(format!(
            "{seen}, yet the bare device does {} times as much at that depth",
            if rate > 0.0 {
                number(1.0 / rate)
            } else {
                "many".into()
            }
        )),
        Some(rate) => Finding::verdict(format!(
            "{seen}, its latency is the host's own at that depth ({} of the bare device's rate)",
            percent(rate)
        )),
        None => Finding::verdict(format!("{seen}; the bare device was not measured")),
    };
    Some(finding.about(name(&device.name)))
}

/// Describes a device whose I/O is mostly not the load's.
fn mixed(evidence: &Evidence, device: &DeviceTime) -> Finding {
    let load = load_in_flight(evidence).map_or_else(|| "?".into(), number);
    let text = format!(
        "the load's part of the device {}, which other I/O uses: {} in flight, and {load} of the \
         load",
        name(&device.name),
        number(device.in_flight.max(0.0)),
    );
    Finding::unseen(text).about(name(&device.name))
}

/// Checks whether the kernel's queues of the device are full and shorter than what is offered:
///
/// ```text
/// room      = requests per hardware queue * hardware queues   [the device's requests]
/// wanted    = offered * parts of a request                    [the device's requests]
/// in flight = mean in flight / share of the window with any   [the device's requests]
/// full      : room < wanted and in flight >= 0.9 * room
/// ```
///
/// The kernel counts a request from the moment it has a place in a queue. The mean is over the time
/// in which the device was in use, since the window also has the start and end of the load.
/// Runs of earlier versions do not have the number of hardware queues, so one full queue is not
/// enough for a verdict.
fn queue_full(evidence: &Evidence, device: &DeviceTime, offered: f64) -> Option<Finding> {
    let queue = f64::from(device.queue.filter(|&queue| queue > 0)?);
    let wanted = offered * parts(device, &evidence.load).unwrap_or(1.0);
    let used = ratio(device.utilisation, 100.0).filter(|&used| used > 0.0);
    let in_flight = ratio(device.in_flight, used.unwrap_or(1.0).min(1.0))?;
    let room = queue * f64::from(device.queues.unwrap_or(1).max(1));
    let is_full = room < wanted && in_flight >= PINNED * room;
    let text = format!(
        "device {}: {} of the {} in flight that its queue has room for, of {} wanted",
        name(&device.name),
        number(in_flight.min(room)),
        number(room),
        number(wanted)
    );
    let finding = match device.queues {
        Some(_) => Finding::verdict(text),
        None => Finding::unseen(format!("how many queues the device has ({text})")),
    };
    is_full.then(|| finding.about(name(&device.name)))
}

/// Returns the load's rate as a share of the bare device's rate.
fn of_bare(evidence: &Evidence) -> Option<f64> {
    let (bare, load) = (evidence.bare.as_ref()?, &evidence.load);
    // None if the load's count is unknown.
    let rate = |count: u64, of: f64| {
        let count = (count > 0).then_some(count as f64)?;
        ratio(ratio(count, evidence.load_seconds())?, of)
    };
    rate(load.requests, bare.requests_per_second)
        .or_else(|| rate(load.bytes, bare.bytes_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Strength;
    use crate::tests::{cell, with};

    /// A cell with 32 requests in flight, all in a device that reaches 80,000 requests per second
    /// by itself.
    fn at_limit() -> Evidence {
        cell(32, 400.0)
    }

    #[test]
    fn busy_device_with_full_queue_is_the_limiter() {
        let finding = at_its_limit(&at_limit()).unwrap();
        assert!(finding.holds());
        assert_eq!(finding.subject.as_deref(), Some("nvme0n1"));
        assert_eq!(
            finding.text,
            "device nvme0n1: 30.4 of 32 in flight, 96% of the request's time, its latency is the \
             host's own at that depth (98% of the bare device's rate)"
        );
        let alone = with(at_limit(), |evidence| evidence.bare = None);
        assert!(at_its_limit(&alone).unwrap().text.ends_with("not measured"));
        // A load that does not count its requests is not slower than the device.
        let uncounted = with(at_limit(), |evidence| {
            (evidence.load.requests, evidence.load.bytes) = (0, 0);
        });
        assert_eq!(of_bare(&uncounted), None);
    }

    #[test]
    fn a_device_that_lacks_one_of_the_three_is_not() {
        let device = |change: fn(&mut DeviceTime)| {
            with(at_limit(), |evidence| {
                change(evidence.device.as_mut().unwrap())
            })
        };
        let kept = |requests: u64| with(at_limit(), |evidence| evidence.load.requests = requests);
        // 28.9 and 28.7 of 32 in flight.
        assert!(at_its_limit(&kept(722_500)).is_some());
        assert!(at_its_limit(&kept(717_500)).is_none());
        assert!(at_its_limit(&device(|device| device.mean_ns = 321_000.0)).is_some());
        assert!(at_its_limit(&device(|device| device.mean_ns = 319_000.0)).is_none());
        // Half of the data came from a cache.
        assert!(at_its_limit(&device(|device| device.bytes /= 2)).is_none());
        let bare = |rate: f64| {
            with(at_limit(), |evidence| {
                evidence.bare.as_mut().unwrap().requests_per_second = rate;
            })
        };
        assert!(at_its_limit(&bare(87_000.0)).unwrap().holds());
        let slower = at_its_limit(&bare(160_000.0)).unwrap();
        assert!(
            !slower.holds() && slower.text.contains("2 times as much"),
            "{}",
            slower.text
        );
    }

    #[test]
    fn one_in_flight_is_no_queue() {
        assert!(at_its_limit(&cell(1, 90.0)).is_none());
    }

    /// A cell with 512 requests offered to a device with this many queues of 64 requests.
    fn queues(queues: Option<u32>, in_flight: f64) -> Evidence {
        with(cell(512, 6400.0), |evidence| {
            let device = evidence.device.as_mut().unwrap();
            (device.queue, device.queues) = (Some(64), queues);
            device.in_flight = in_flight;
            device.mean_ns = 800_000.0;
        })
    }

    #[test]
    fn a_queue_that_is_shorter_than_what_is_offered_is_the_limit() {
        let finding = at_its_limit(&queues(Some(1), 63.0)).unwrap();
        assert!(finding.holds());
        assert!(
            finding.text.contains("63 of the 64 in flight"),
            "{}",
            finding.text
        );
        assert!(at_its_limit(&queues(Some(1), 57.0)).is_none());
    }

    #[test]
    fn all_hardware_queues_together_have_the_room() {
        assert!(at_its_limit(&queues(Some(4), 63.0)).is_none());
        assert!(at_its_limit(&queues(Some(4), 250.0)).unwrap().holds());
        // Eight queues have room for all that is offered.
        assert!(at_its_limit(&queues(Some(8), 500.0)).is_none());
        let earlier = at_its_limit(&queues(None, 63.0)).unwrap();
        assert_eq!(earlier.strength, Strength::Unseen);
    }

    #[test]
    fn parts_of_requests_need_a_place_each() {
        let split = |parts: u64| {
            with(queues(Some(1), 63.0), |evidence| {
                evidence.load.depth = 32;
                evidence.device.as_mut().unwrap().requests *= parts;
            })
        };
        assert!(at_its_limit(&split(1)).is_none(), "room for all 32");
        let finding = at_its_limit(&split(4)).unwrap();
        assert!(finding.text.ends_with("of 128 wanted"), "{}", finding.text);
    }

    #[test]
    fn a_queue_is_full_while_the_device_is_in_use() {
        let part = with(queues(Some(1), 32.0), |evidence| {
            evidence.device.as_mut().unwrap().utilisation = 51.0;
        });
        assert!(at_its_limit(&part).unwrap().holds());
    }

    #[test]
    fn others_io_makes_the_loads_part_unseen() {
        let others = with(at_limit(), |evidence| {
            let device = evidence.device.as_mut().unwrap();
            device.bytes *= 100;
            device.in_flight = 36.1;
        });
        let finding = at_its_limit(&others).unwrap();
        assert_eq!(finding.strength, Strength::Unseen);
        assert_eq!(
            finding.text,
            "the load's part of the device nvme0n1, which other I/O uses: 36.1 in flight, and 31.7 \
             of the load"
        );
    }
}
