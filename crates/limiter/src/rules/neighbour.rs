//! Other programs that use most of the block device.

use fathom_run::evidence::Evidence;

use crate::device_part::others_share;
use crate::figures::{BUSY, KEPT, load_in_flight, name, number, offered, percent, ratio, share};
use crate::layers::STORAGE;
use crate::rule::Finding;
use crate::slices::{Kind, slices};

/// Minimum share of the device's bytes that other programs read and write.
const MOST: f64 = 0.50;
/// Share of a request's time that was seen in another layer, from which that layer is the limit.
const ELSEWHERE: f64 = 0.50;

/// Holds if other programs keep the device in use while the load waits for its requests:
///
/// ```text
/// others' share of the device         >= 0.5   [of its bytes, see `others_share`]
/// device in use                       >= 0.8   [of the window]
/// in flight / offered                 >= 0.5   [requests, over the load's own seconds]
/// layer other than the block device's <  0.5   [of a request's mean time, for each such layer]
/// ```
///
/// The device's times are a mean of the load's requests and those of others. Therefore this rule
/// comes after those whose part of a request's time was measured.
pub fn uses_device(evidence: &Evidence) -> Option<Finding> {
    let device = evidence.device.as_ref()?;
    let others = others_share(evidence).filter(|&others| others >= MOST)?;
    let in_use = share(device.utilisation, 100.0)?;
    let (in_flight, offered) = (load_in_flight(evidence)?, offered(&evidence.load)?);
    let text = format!(
        "other programs on the device {}: {} of its bytes; {} in flight, and {} of the load; in use \
         {} of the time",
        name(&device.name),
        percent(others),
        number(ratio(device.in_flight, 1.0)?),
        number(in_flight),
        percent(in_use)
    );
    let is_elsewhere = slices(evidence).iter().any(|slice| {
        let is_other = matches!(&slice.kind, Kind::Layer(name) if name != STORAGE);
        (is_other || matches!(slice.kind, Kind::Filter(_))) && slice.share >= ELSEWHERE
    });
    let holds = in_use >= BUSY && in_flight >= KEPT * offered && !is_elsewhere;
    let finding = match holds {
        true => Finding::verdict(text),
        false => Finding::weak(text),
    };
    Some(finding.about(name(&device.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Layer;

    /// A load with 4 requests in flight, while another program has 32 of 1 MiB.
    fn shared(own_bytes: Option<u64>) -> Evidence {
        with(cell(4, 900.0), |evidence| {
            let device = evidence.device.as_mut().unwrap();
            device.requests += 20_000;
            device.bytes += 20_000 << 20;
            (device.in_flight, device.mean_ns) = (36.0, 8e6);
            device.own_bytes = own_bytes;
        })
    }

    fn own() -> Option<u64> {
        Some(cell(4, 900.0).load.bytes)
    }

    #[test]
    fn programs_with_most_of_the_devices_io_are_named() {
        let finding = uses_device(&shared(own())).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "other programs on the device nvme0n1: 99% of its bytes; 36 in flight, and 4 of the \
             load; in use 100% of the time"
        );
    }

    #[test]
    fn io_whose_origin_was_not_seen_is_not_a_neighbours() {
        assert!(uses_device(&shared(None)).is_none());
        // The server's own I/O is not among what was seen.
        assert!(uses_device(&shared(Some(4096))).is_none());
        assert!(uses_device(&cell(4, 900.0)).is_none());
        // All of it is the server's own: copies of clusters, or a job.
        let bytes = shared(None).device.unwrap().bytes;
        assert!(uses_device(&shared(Some(bytes))).is_none());
    }

    #[test]
    fn time_elsewhere_is_not_a_neighbours() {
        let layer = |name: &str, share: f64| Layer {
            name: name.into(),
            mean_ns: share * 900e3,
        };
        let held = |layers| {
            let evidence = with(shared(own()), |evidence| evidence.layers = layers);
            uses_device(&evidence).unwrap().holds()
        };
        assert!(held(vec![layer("guest", 0.2), layer(STORAGE, 0.8)]));
        assert!(!held(vec![layer("fathom: map", 0.6), layer(STORAGE, 0.4)]));
        let idle = with(shared(own()), |evidence| {
            evidence.device.as_mut().unwrap().utilisation = 60.0;
        });
        assert!(!uses_device(&idle).unwrap().holds());
    }
}
