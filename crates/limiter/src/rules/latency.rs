//! Latency: nothing is busy, and the rate follows from the time of each request.

use fathom_run::evidence::Evidence;

use crate::device_part::device_share;
use crate::figures::{
    BUSY, KEPT, largest, load_in_flight, number, offered, on_path, percent, possible, ratio, share,
    thread, time, working,
};
use crate::layers::STORAGE;
use crate::rule::Finding;
use crate::rules::thread::poller;
use crate::slices::{self, Kind, Slice, slices};

/// Minimum share of a request's time that must have been seen. With less, the largest part may be
/// one that was not seen.
const SEEN: f64 = 0.50;

/// Holds if the load keeps its requests in flight, nothing on their path is busy, and it was seen
/// where they spend their time:
///
/// ```text
/// in flight / offered                     >= 0.5   [requests, over the load's own seconds]
/// CPU share of each thread, without polls <  0.8   [seconds per second of the window]
/// busy share of each CPU of the guest     <  0.8   [of the window]
/// busy share of the host's CPUs together  <  0.8   [of their time without steal and polls]
/// sum of the parts of a request's time    >= 0.5   [of its mean time, see `slices`]
/// ```
///
/// With one request offered there is no queue, and a busy thread is a part of the request's time.
/// If the load is known only from its disk, at least half a request must be in flight.
///
/// If it was not seen where the time goes, the finding is missing evidence. The time between the
/// server and the block device was not seen either, where a group's I/O limit holds requests:
///
/// ```text
/// layer `host: device` - device's share >= 0.5   [of a request's mean time]
/// ```
pub fn bound(evidence: &Evidence) -> Option<Finding> {
    let load = &evidence.load;
    let in_flight = load_in_flight(evidence)?;
    let offered = offered(load);
    if ratio(in_flight, possible(load)?)? < KEPT {
        return None;
    }
    let busy = busy(evidence);
    let may_be_busy = busy.is_some() || poller(evidence).is_some();
    if offered.unwrap_or(in_flight) > 1.0 && may_be_busy {
        return None;
    }
    let depth = match (offered, load.threads) {
        (None, _) => format!("{} in flight", number(in_flight)),
        (_, 1) => format!("depth {}", load.depth),
        (_, threads) => format!("{threads} threads x depth {}", load.depth),
    };
    let none = match evidence.host {
        Some(_) => "nothing busy",
        None => "no busy thread seen",
    };
    let busy = busy.unwrap_or_else(|| none.into());
    let slices = slices(evidence);
    let each = format!("{depth} / {}, {busy}", time(load.mean_ns));
    let unseen = slices::unseen(&slices);
    let Some(largest) = slices::largest(&slices).filter(|_| unseen <= 1.0 - SEEN) else {
        let share = percent(unseen);
        let text = format!("where {share} of the request's time goes ({each})");
        return Some(Finding::unseen(text));
    };
    if let Some(between) = above_device(evidence, &slices) {
        let share = percent(between);
        let text = format!(
            "what holds requests between the server and the device for {share} of their time, such \
             as an I/O limit of a group ({each})"
        );
        return Some(Finding::unseen(text));
    }
    let finding = Finding::verdict(format!("latency: {each}; {}", part(largest)));
    Some(match &largest.kind {
        Kind::Layer(name) => finding.about(name.clone()),
        _ => finding,
    })
}

/// Returns the share of a request's time between the server and its block device, if that is most
/// of the time.
fn above_device(evidence: &Evidence, slices: &[Slice]) -> Option<f64> {
    let is_storage = |kind: &Kind| matches!(kind, Kind::Layer(name) if name == STORAGE);
    let storage = slices.iter().find(|slice| is_storage(&slice.kind))?;
    let between = storage.share - device_share(evidence)?;
    (between >= SEEN).then_some(between)
}

/// Describes the largest part of a request's time.
fn part(slice: &Slice) -> String {
    let share = percent(slice.share);
    match &slice.kind {
        Kind::Layer(name) => format!("largest layer {name} ({share})"),
        Kind::Device => format!("{share} of it is the block device's"),
        Kind::Filter(filter) => format!("{share} of it is the {filter} filter's"),
        Kind::Work => format!("{share} of it is work of the path's threads"),
    }
}

/// Describes the thread, or the CPUs of guest or host, that are so busy that requests may queue
/// for them.
fn busy(evidence: &Evidence) -> Option<String> {
    let runs = |role| on_path(role) || role == fathom_run::evidence::ThreadRole::Kernel;
    let found = largest(evidence, runs, |one| working(evidence, one));
    if let Some((share, busiest)) = found.filter(|(share, _)| *share >= BUSY) {
        return Some(format!("{} on CPU {}", thread(busiest), percent(share)));
    }
    busy_guest(evidence).or_else(|| busy_host(evidence))
}

fn busy_guest(evidence: &Evidence) -> Option<String> {
    let guest = evidence.guest.as_ref()?.busy.iter();
    let busiest = guest
        .filter_map(|&busy| share(busy, 100.0))
        .max_by(f64::total_cmp);
    let busiest = busiest.filter(|&busy| busy >= BUSY)?;
    Some(format!("a CPU of the guest {} busy", percent(busiest)))
}

/// Counts all programs of the host, but not the polling of threads that report it.
fn busy_host(evidence: &Evidence) -> Option<String> {
    let host = evidence.host.as_ref()?;
    let seconds = |percents: &[f64]| percents.iter().sum::<f64>() / 100.0 * evidence.seconds;
    let polled: f64 = evidence.threads.iter().filter_map(|one| one.polled).sum();
    let all = host.busy.len() as f64 * evidence.seconds - seconds(&host.steal);
    let busy = share(seconds(&host.busy) - polled, all).filter(|&busy| busy >= BUSY)?;
    Some(format!("the host's CPUs {} busy", percent(busy)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Strength;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Layer;

    #[test]
    fn depth_one_on_an_idle_machine_is_latency_bound() {
        let layers = with(cell(1, 212.0), |evidence| {
            let layer = |name: &str, us: f64| Layer {
                name: name.into(),
                mean_ns: us * 1e3,
            };
            evidence.layers = vec![layer("guest", 30.0), layer("host: device", 152.0)];
        });
        let finding = bound(&layers).unwrap();
        assert_eq!(
            finding.text,
            "latency: depth 1 / 212 us, nothing busy; largest layer host: device (72%)"
        );
        assert_eq!(finding.subject.as_deref(), Some("host: device"));
        let device = bound(&cell(1, 212.0)).unwrap().text;
        assert!(
            device.ends_with("96% of it is the block device's"),
            "{device}"
        );
    }

    #[test]
    fn latency_of_which_most_was_not_seen_is_unknown() {
        let blind = |device: f64| {
            with(cell(4, 212.0), |evidence| {
                evidence.device.as_mut().unwrap().mean_ns = device * 212e3;
                evidence.threads.clear();
            })
        };
        assert!(bound(&blind(0.51)).unwrap().holds());
        let unseen = bound(&blind(0.38)).unwrap();
        assert_eq!(unseen.strength, Strength::Unseen);
        assert_eq!(
            unseen.text,
            "where 62% of the request's time goes (depth 4 / 212 us, nothing busy)"
        );
    }

    #[test]
    fn time_above_the_device_is_unseen() {
        let above = |device: f64| {
            with(cell(1, 3300.0), |evidence| {
                evidence.device.as_mut().unwrap().mean_ns = device * 3.3e6;
                evidence.layers.push(Layer {
                    name: STORAGE.into(),
                    mean_ns: 0.97 * 3.3e6,
                });
            })
        };
        assert!(bound(&above(0.48)).unwrap().holds());
        let capped = bound(&above(0.03)).unwrap();
        assert_eq!(capped.strength, Strength::Unseen);
        assert_eq!(
            capped.text,
            "what holds requests between the server and the device for 94% of their time, such as \
             an I/O limit of a group (depth 1 / 3.3 ms, nothing busy)"
        );
    }

    #[test]
    fn a_busy_host_is_not_nothing() {
        let host = |depth: u32, busy: f64, polled: f64| {
            with(cell(depth, 400.0), |evidence| {
                evidence.host.as_mut().unwrap().busy = vec![busy; 2];
                evidence.threads[1].polled = Some(polled);
            })
        };
        assert!(bound(&host(4, 79.0, 0.0)).is_some());
        assert!(bound(&host(4, 99.5, 0.0)).is_none());
        assert!(bound(&host(4, 99.5, 6.0)).is_some(), "that is polling");
        let one = bound(&host(1, 98.0, 0.0)).unwrap().text;
        assert!(one.contains("the host's CPUs 98% busy"), "{one}");
    }

    #[test]
    fn a_load_that_is_known_from_its_disk_has_no_depth() {
        let disk = |part: u64| {
            with(cell(1, 212.0), |evidence| {
                (evidence.load.threads, evidence.load.depth) = (0, 0);
                evidence.load.requests = evidence.load.requests * part / 100;
            })
        };
        let finding = bound(&disk(100)).unwrap();
        assert!(finding.text.starts_with("latency: 1 in flight / 212 us"));
        assert!(bound(&disk(48)).is_none());
    }

    #[test]
    fn at_depth_somebody_busy_may_be_queued_for() {
        let worker = |depth: u32, cpu: f64| {
            with(cell(depth, 400.0), |evidence| evidence.threads[1].cpu = cpu)
        };
        assert!(bound(&worker(32, 7.9)).is_some());
        assert!(bound(&worker(32, 8.1)).is_none());
        let alone = bound(&worker(1, 8.1)).unwrap().text;
        assert!(
            alone.contains("I/O thread 'worker 0' on CPU 81%"),
            "{alone}"
        );
        let polls = |depth| {
            with(worker(depth, 10.0), |evidence| {
                evidence.threads[1].polls = true
            })
        };
        assert!(bound(&polls(1)).is_some());
        assert!(bound(&polls(2)).is_none(), "it may be work");
    }

    #[test]
    fn a_load_that_does_not_load_is_not_bound_by_latency() {
        let paced = |part: u64| {
            with(cell(1, 212.0), |evidence| {
                evidence.load.requests = evidence.load.requests * part / 100;
            })
        };
        assert!(bound(&paced(52)).is_some());
        assert!(bound(&paced(48)).is_none());
    }
}
