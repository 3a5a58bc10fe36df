//! The block device's part of the load's requests.
//!
//! A device counts all of its I/O, also that of other programs. The figures of a device describe
//! the load only if the load accounts for most of them.

use fathom_run::evidence::{DeviceTime, Evidence, Load};

use crate::figures::{load_in_flight, offered, ratio};

/// Most bytes of the device per byte of the load that may still be the load's own: the tables of an
/// image, a journal and read-ahead add less than the load itself.
const AMPLIFIED: f64 = 2.0;
/// Share of the device's bytes from which other programs make its times their own.
const OTHERS: f64 = 0.50;
/// Least bytes of the watched processes per byte of the load for which these processes are those
/// that serve the load's requests from the device.
const SERVED: f64 = 0.50;
/// Most that a part may exceed the whole, since counters and windows do not end at exactly the same
/// moment.
const EDGE: f64 = 1.10;

/// Part of a request's time that the device's figures show.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DevicePart {
    /// No device was recorded, or its figures cannot be compared with the load's.
    Unseen,
    /// Most of the device's I/O is not the load's, so that its times are not the load's either.
    Mixed,
    /// Share of the mean time of all requests of the load, from 0 to 1.
    Is(f64),
}

/// Returns the device's share of the mean time of a request of the load.
///
/// ```text
/// share   = device mean [ns] * min(reached, 1) * serves / load mean [ns]
/// reached = bytes of the device / bytes of the load (without bytes: their requests)
/// serves  = min(1, offered * bytes of a load's request / bytes of a device's request)
/// ```
///
/// - A request served by a cache spends no time in the device (`reached`).
/// - Parts of a request are in the device at the same time, and merged requests share one. Both
///   are covered by counting bytes. But no more requests than are offered can wait for a request of
///   the device (`serves`): the rest of its bytes is read-ahead.
///
/// The figures are `Mixed` if other programs have at least half of the device's bytes (see
/// `others_share`), or if the share is above 1.1. If the bytes of others are not known, they are
/// `Mixed` if the device moves more than twice the bytes of the load per second.
pub fn device_part(evidence: &Evidence) -> DevicePart {
    let (Some(device), load) = (evidence.device.as_ref(), &evidence.load) else {
        return DevicePart::Unseen;
    };
    let Some(reached) = reached(device, load) else {
        return DevicePart::Unseen;
    };
    // The load may have run for a part of the window, and the device counts the whole of it.
    let of_window = ratio(evidence.load_seconds(), evidence.seconds).map_or(1.0, |it| it.min(1.0));
    let is_mixed = match others_share(evidence) {
        Some(others) => others >= OTHERS,
        None => reached * of_window > AMPLIFIED,
    };
    if is_mixed {
        return DevicePart::Mixed;
    }
    let serves = parts(device, load)
        .zip(offered(load))
        .map_or(1.0, |(parts, offered)| (offered * parts).min(1.0));
    match ratio(device.mean_ns * reached.min(1.0) * serves, load.mean_ns) {
        Some(share) if share > EDGE => DevicePart::Mixed,
        Some(share) => DevicePart::Is(share.min(1.0)),
        None => DevicePart::Unseen,
    }
}

/// Returns the share of the device's bytes that are not of the watched processes.
///
/// ```text
/// share = 1 - own bytes / bytes of the device, at least 0
/// ```
///
/// `None` if the bytes of the watched processes are not known, or if these processes do not serve
/// the load's requests from the device: `own bytes / bytes of the load < 0.5`. Then the requests
/// come from a cache, or another process serves them.
pub fn others_share(evidence: &Evidence) -> Option<f64> {
    let device = evidence.device.as_ref()?;
    let own = device.own_bytes? as f64;
    ratio(own, evidence.load.bytes as f64).filter(|&served| served >= SERVED)?;
    Some(1.0 - ratio(own, device.bytes as f64)?.min(1.0))
}

/// Returns the device's share of a request's mean time, if the device's figures are the load's.
pub fn device_share(evidence: &Evidence) -> Option<f64> {
    match device_part(evidence) {
        DevicePart::Is(share) => Some(share),
        DevicePart::Mixed | DevicePart::Unseen => None,
    }
}

/// Returns the mean number of the load's requests that are in the device, over the load's own
/// seconds: `share * requests in flight`. Therefore it is never above what is in flight.
pub fn device_in_flight(evidence: &Evidence) -> Option<f64> {
    Some(device_share(evidence)? * load_in_flight(evidence)?)
}

/// Returns the number of requests of the device per request of the load, by their sizes. Below 1,
/// requests are merged.
pub fn parts(device: &DeviceTime, load: &Load) -> Option<f64> {
    let size =
        |bytes: u64, requests: u64| ratio(bytes as f64, requests as f64).filter(|&size| size > 0.0);
    ratio(
        size(load.bytes, load.requests)?,
        size(device.bytes, device.requests)?,
    )
}

/// Returns the device's I/O per I/O of the load, without limit.
fn reached(device: &DeviceTime, load: &Load) -> Option<f64> {
    ratio(device.bytes as f64, load.bytes as f64)
        .or_else(|| ratio(device.requests as f64, load.requests as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};

    /// A cell whose device has this part of the load's bytes, and this mean time as a part of the
    /// load's.
    fn device(depth: u32, bytes: f64, mean: f64) -> Evidence {
        with(cell(depth, 400.0), |evidence| {
            let device = evidence.device.as_mut().unwrap();
            device.bytes = (evidence.load.bytes as f64 * bytes) as u64;
            device.requests = (evidence.load.requests as f64 * bytes) as u64;
            device.mean_ns = evidence.load.mean_ns * mean;
        })
    }

    #[track_caller]
    fn is(evidence: &Evidence, share: f64) {
        let found = device_share(evidence).unwrap();
        assert!((found - share).abs() < 1e-3, "{found} instead of {share}");
    }

    #[test]
    fn requests_from_a_cache_spend_no_time_in_the_device() {
        is(&device(32, 1.0, 0.96), 0.96);
        // Half of the requests take twice the mean time, and the others take none.
        is(&device(32, 0.5, 1.92), 0.96);
        is(&device(1, 0.1, 3.0), 0.3);
    }

    #[test]
    fn split_requests_are_counted_as_the_loads() {
        // Each request of 1 MiB became four of 256 KiB, which are in the device at the same time.
        let split = with(device(32, 1.0, 0.9), |evidence| {
            evidence.device.as_mut().unwrap().requests *= 4;
        });
        is(&split, 0.9);
        let in_flight = device_in_flight(&split).unwrap();
        assert!((in_flight - 0.9 * 31.68).abs() < 0.01, "{in_flight}");
    }

    #[test]
    fn merged_requests_share_a_request_of_the_device() {
        let merged = |depth| {
            with(device(depth, 1.0, 0.9), |evidence| {
                evidence.device.as_mut().unwrap().requests /= 4;
            })
        };
        is(&merged(32), 0.9);
        // With one request in flight there is nothing to merge: three in four come from read-ahead.
        is(&merged(1), 0.9 / 4.0);
    }

    #[test]
    fn io_of_other_programs_is_not_the_loads() {
        assert_eq!(device_part(&device(4, 2.1, 0.5)), DevicePart::Mixed);
        assert_eq!(device_part(&device(4, 1.0, 2.0)), DevicePart::Mixed);
        is(&device(4, 1.9, 0.5), 0.5);
        is(&device(4, 1.0, 1.05), 1.0);
        // The device counts the start of the load, too.
        let start = with(device(4, 2.1, 0.5), |evidence| {
            evidence.load.seconds = 9.0;
        });
        is(&start, 0.5);
    }

    #[test]
    fn a_processs_own_io_is_not_that_of_others() {
        // Each write of the load copies a cluster of 64 KiB.
        let copies = with(device(4, 16.0, 0.5), |evidence| {
            let device = evidence.device.as_mut().unwrap();
            device.own_bytes = Some(device.bytes);
        });
        is(&copies, 0.5);
        let own = |share: f64| {
            with(device(4, 1.9, 0.5), |evidence| {
                let device = evidence.device.as_mut().unwrap();
                device.own_bytes = Some((device.bytes as f64 * share) as u64);
            })
        };
        is(&own(0.6), 0.5);
        assert_eq!(device_part(&own(0.4)), DevicePart::Mixed);
        // Another process serves the load.
        is(&own(0.1), 0.5);
        assert_eq!(others_share(&own(0.1)), None);
    }

    #[test]
    fn without_figures_it_is_unseen() {
        let none = with(device(4, 1.0, 0.5), |evidence| evidence.device = None);
        assert_eq!(device_part(&none), DevicePart::Unseen);
        assert_eq!(device_part(&Evidence::default()), DevicePart::Unseen);
        // Flushes have no bytes.
        let flushes = with(device(1, 1.0, 0.5), |evidence| evidence.load.bytes = 0);
        is(&flushes, 0.5);
    }
}
