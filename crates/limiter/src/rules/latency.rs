//! Latency: nothing is busy, and the rate follows from the time of each request.

use fathom_run::evidence::Evidence;

use crate::device_part::device_share;
use crate::figures::{
    BUSY, largest, load_in_flight, name, offered, on_path, percent, ratio, share, thread, time,
    working,
};
use crate::rule::Finding;
use crate::rules::thread::poller;

/// Minimum share of the offered requests that are in flight; with less, the load is mostly busy
/// with something else.
const KEPT: f64 = 0.50;

pub fn bound(evidence: &Evidence) -> Option<Finding> {
    let load = &evidence.load;
    let offered = offered(load)?;
    if ratio(load_in_flight(evidence)?, offered)? < KEPT {
        return None;
    }
    let busy = busy(evidence);
    // With one request in flight there is no queue, and all work is a part of the request's time.
    let may_be_busy = busy.is_some() || poller(evidence).is_some();
    if offered > 1.0 && may_be_busy {
        return None;
    }
    let depth = match load.threads {
        1 => format!("depth {}", load.depth),
        threads => format!("{threads} threads x depth {}", load.depth),
    };
    let busy = busy.unwrap_or_else(|| "nothing busy".into());
    let (layer, layer_text) = largest_layer(evidence);
    let text = format!(
        "latency: {depth} / {}, {busy}; {layer_text}",
        time(load.mean_ns)
    );
    let finding = Finding::verdict(text);
    Some(match layer {
        Some(layer) => finding.about(layer),
        None => finding,
    })
}

/// Describes the thread or guest CPU that is so busy that requests may queue for it.
fn busy(evidence: &Evidence) -> Option<String> {
    let runs = |role| on_path(role) || role == fathom_run::evidence::ThreadRole::Kernel;
    let found = largest(evidence, runs, |one| working(evidence, one));
    if let Some((share, busiest)) = found.filter(|(share, _)| *share >= BUSY) {
        return Some(format!("{} on CPU {}", thread(busiest), percent(share)));
    }
    let guest = evidence.guest.as_ref()?.busy.iter();
    let busiest = guest
        .filter_map(|&busy| share(busy, 100.0))
        .max_by(f64::total_cmp);
    let busiest = busiest.filter(|&busy| busy >= BUSY)?;
    Some(format!("a CPU of the guest {} busy", percent(busiest)))
}

/// Returns the name of the largest layer, and its description.
fn largest_layer(evidence: &Evidence) -> (Option<String>, String) {
    let whole = evidence.load.mean_ns;
    let layers = evidence.layers.iter();
    let layers = layers.filter_map(|layer| Some((share(layer.mean_ns, whole)?, layer)));
    if let Some((share, layer)) = layers.max_by(|one, other| one.0.total_cmp(&other.0)) {
        let name = name(&layer.name);
        let text = format!("largest layer {name} ({})", percent(share));
        return (Some(name), text);
    }
    match device_share(evidence) {
        Some(share) => (
            None,
            format!("{} of it is the block device's", percent(share)),
        ),
        None => (None, "the layers were not measured".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let blind = bound(&cell(1, 212.0)).unwrap().text;
        assert!(
            blind.ends_with("96% of it is the block device's"),
            "{blind}"
        );
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
