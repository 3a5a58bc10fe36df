//! A device at its limit: it holds all requests of the load all the time, and is no faster without
//! the stack.

use fathom_run::evidence::{DeviceTime, Evidence};

use crate::figures::{device_in_flight, device_share, name, number, offered, percent, ratio};
use crate::rule::Finding;

/// Minimum share of the offered requests that are in the device; the load needs a moment between
/// two requests.
const PINNED: f64 = 0.90;
/// Minimum share of a request's time that is spent in the device. A fast stack adds less than a
/// fifth to a device at depth; if more time is spent elsewhere, the device is not the limit.
const NEARLY_ALL: f64 = 0.80;
/// Minimum share of the bare device's rate at the same depth. Repeated runs of one device differ by
/// less.
const AS_FAST: f64 = 0.90;

pub fn at_its_limit(evidence: &Evidence) -> Option<Finding> {
    let device = evidence.device.as_ref()?;
    // A single request in flight is always all that is offered; the latency rule covers it.
    let offered = offered(&evidence.load).filter(|&offered| offered > 1.0)?;
    if let Some(finding) = queue_full(device, offered) {
        return Some(finding);
    }
    let in_flight = device_in_flight(device, &evidence.load)?;
    let time = device_share(evidence)?;
    if in_flight < PINNED * offered || time < NEARLY_ALL {
        return None;
    }
    let seen = format!(
        "device {}: {} of {} in flight, {} of the request's time",
        name(&device.name),
        number(in_flight),
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
        Some(rate) => Finding::holds(format!(
            "{seen}, its latency is the host's own at that depth ({} of the bare device's rate)",
            percent(rate)
        )),
        None => Finding::holds(format!("{seen}; the bare device was not measured")),
    };
    Some(finding.about(name(&device.name)))
}

/// Checks whether the kernel's queue of the device is full and shorter than the offered depth.
fn queue_full(device: &DeviceTime, offered: f64) -> Option<Finding> {
    let queue = f64::from(device.queue?);
    let in_flight = ratio(device.in_flight, queue)?;
    let finding = Finding::holds(format!(
        "device {}: {} of the {} in flight that its queue has room for, of {} offered",
        name(&device.name),
        number(device.in_flight),
        number(queue),
        number(offered)
    ));
    let is_full = queue < offered && in_flight >= PINNED;
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
    use crate::tests::{cell, with};

    /// A cell with 32 requests in flight, all in a device that reaches 80,000 requests per second
    /// by itself.
    fn at_limit() -> Evidence {
        cell(32, 400.0)
    }

    #[test]
    fn busy_device_with_full_queue_is_the_limiter() {
        let finding = at_its_limit(&at_limit()).unwrap();
        assert!(finding.holds);
        assert_eq!(finding.subject.as_deref(), Some("nvme0n1"));
        assert_eq!(
            finding.text,
            "device nvme0n1: 30.7 of 32 in flight, 96% of the request's time, its latency is the \
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
        assert!(at_its_limit(&device(|device| device.in_flight = 28.9)).is_some());
        assert!(at_its_limit(&device(|device| device.in_flight = 28.7)).is_none());
        assert!(at_its_limit(&device(|device| device.mean_ns = 321_000.0)).is_some());
        assert!(at_its_limit(&device(|device| device.mean_ns = 319_000.0)).is_none());
        // Half of the data came from a cache.
        assert!(at_its_limit(&device(|device| device.bytes /= 2)).is_none());
        let bare = |rate: f64| {
            with(at_limit(), |evidence| {
                evidence.bare.as_mut().unwrap().requests_per_second = rate;
            })
        };
        assert!(at_its_limit(&bare(87_000.0)).unwrap().holds);
        let slower = at_its_limit(&bare(160_000.0)).unwrap();
        assert!(
            !slower.holds && slower.text.contains("2 times as much"),
            "{}",
            slower.text
        );
    }

    #[test]
    fn one_in_flight_is_no_queue() {
        assert!(at_its_limit(&cell(1, 90.0)).is_none());
    }

    #[test]
    fn a_queue_that_is_shorter_than_what_is_offered_is_the_limit() {
        let full = |in_flight: f64| {
            with(cell(512, 6400.0), |evidence| {
                let device = evidence.device.as_mut().unwrap();
                device.queue = Some(64);
                device.in_flight = in_flight;
                device.mean_ns = 800_000.0;
            })
        };
        let finding = at_its_limit(&full(63.0)).unwrap();
        assert!(
            finding.text.contains("63 of the 64 in flight"),
            "{}",
            finding.text
        );
        assert!(at_its_limit(&full(57.0)).is_none());
    }
}
