//! Parts of a request's mean time, as far as they were seen.

use fathom_run::evidence::{Evidence, ThreadRole};

use crate::device_part::device_share;
use crate::figures::{load_in_flight, name, offered, on_path, share, worked};
use crate::layers::{OUTSIDE, is_in_server};

/// A part of a request's mean time.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    pub kind: Kind,
    /// Share of the request's time, from 0 to 1.
    pub share: f64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A layer, by name. The layers add up to the whole time.
    Layer(String),
    /// The block device.
    Device,
    /// A filter, by name.
    Filter(String),
    /// Work of the threads on the path: their CPU time.
    Work,
}

/// Returns the parts that were seen: the layers if they were measured, else the device, the filters
/// and the work of threads.
///
/// ```text
/// layer or filter = its mean [ns] / load mean [ns]
/// device          = see `device_part`
/// work            = CPU time of the path's threads without polling [s / s of the window]
///                   / mean number of the load's requests in flight
/// ```
pub fn slices(evidence: &Evidence) -> Vec<Slice> {
    let part = |kind, mean_ns| {
        let share = share(mean_ns, evidence.load.mean_ns)?;
        Some(Slice { kind, share })
    };
    let layers = evidence.layers.iter();
    let layers = layers.filter_map(|one| part(Kind::Layer(name(&one.name)), one.mean_ns));
    let layers: Vec<Slice> = layers.collect();
    if !layers.is_empty() {
        return layers;
    }
    let filters = evidence.filters.iter();
    let filters = filters.filter_map(|one| part(Kind::Filter(name(&one.filter)), one.mean_ns));
    let one = |kind, share: Option<f64>| share.map(|share| Slice { kind, share });
    filters
        .chain(one(Kind::Device, device_share(evidence)))
        .chain(one(Kind::Work, work(evidence)))
        .collect()
}

/// Returns the share of a request's time that is in none of the slices.
pub fn unseen(slices: &[Slice]) -> f64 {
    let seen: f64 = slices.iter().map(|slice| slice.share).sum();
    (1.0 - seen).max(0.0)
}

/// Returns the largest slice.
pub fn largest(slices: &[Slice]) -> Option<&Slice> {
    let slices = slices.iter();
    slices.max_by(|one, other| one.share.total_cmp(&other.share))
}

/// Returns the share of a request's time in which threads on the path work for it.
fn work(evidence: &Evidence) -> Option<f64> {
    let threads = evidence.threads.iter().filter(|one| on_path(one.role));
    let shares = threads.filter_map(|one| worked(evidence, one));
    let sum = shares.fold(None, |sum, share| Some(sum.unwrap_or(0.0) + share));
    share(sum?, load_in_flight(evidence)?)
}

/// Where threads and CPUs of one kind handle requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The guest, its QEMU, and a load on the host.
    Guest,
    /// The disk's server.
    Server,
    /// CPUs of the host, which both use.
    Both,
}

impl Side {
    pub fn of(role: ThreadRole) -> Side {
        match role {
            ThreadRole::Io | ThreadRole::Pool => Side::Server,
            _ => Side::Guest,
        }
    }

    /// Returns true if a layer contains the time in which requests wait for this side.
    ///
    /// A server that has no CPU also sees the end of a request in the device late. Requests wait
    /// for the server in their queues, which is outside of its own stages.
    fn has(self, layer: &str) -> bool {
        match self {
            Side::Guest => !is_in_server(layer),
            Side::Server => is_in_server(layer) || layer == OUTSIDE,
            Side::Both => true,
        }
    }

    /// Returns the largest share of a request's time that was seen elsewhere: in the block device,
    /// in a filter or in a layer of the other side.
    pub fn elsewhere(self, evidence: &Evidence) -> f64 {
        let layers = named(&evidence.layers, evidence, |one| (&one.name, one.mean_ns));
        let layers = layers.filter(|(name, _)| !self.has(name));
        let filters = named(&evidence.filters, evidence, |one| {
            (&one.filter, one.mean_ns)
        });
        let shares = layers.chain(filters).map(|(_, share)| share);
        shares.chain(device_share(evidence)).fold(0.0, f64::max)
    }

    /// Returns the share of a request's time in which requests may wait for this side: its layers
    /// and what was not seen.
    fn room(self, evidence: &Evidence) -> f64 {
        let slices = slices(evidence);
        let own = slices.iter();
        let own = own.filter(|one| matches!(&one.kind, Kind::Layer(name) if self.has(name)));
        let own: f64 = own.map(|slice| slice.share).sum();
        (own + unseen(&slices)).min(1.0 - self.elsewhere(evidence))
    }
}

/// Waiting as a part of a request's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waiting {
    /// The share of a request's time is at most this, from 0 to 1.
    pub most: f64,
    /// No other part that was seen is larger.
    pub is_largest: bool,
    /// Neither is the rest of the time in which requests may wait for the same.
    pub explains: bool,
}

impl Waiting {
    /// Compares waiting for a CPU with the other parts of a request's time.
    ///
    /// ```text
    /// most     = min(room, max(waits of one * offered, sum of waits) / requests in flight)
    /// largest  : most > what was seen elsewhere
    /// explains : most >= room - most
    /// room     = the layers of this side, and what was not seen
    /// ```
    ///
    /// `waits` are in seconds per second of the window, and the results have no unit. A thread
    /// delays at most all requests that are offered, and each wait delays at least one request.
    /// `None` if it is not known how many requests are in flight.
    pub fn of(evidence: &Evidence, side: Side, waits: &[f64]) -> Option<Waiting> {
        let in_flight = load_in_flight(evidence)?;
        let offered = offered(&evidence.load).unwrap_or(in_flight.max(1.0));
        let sum: f64 = waits.iter().sum();
        let one = waits.iter().copied().fold(0.0, f64::max) * offered;
        let room = side.room(evidence);
        let most = share(sum.max(one), in_flight)?.min(room);
        Some(Waiting {
            most,
            is_largest: most > side.elsewhere(evidence),
            explains: most >= room - most,
        })
    }
}

fn named<'a, T>(
    all: &'a [T],
    evidence: &'a Evidence,
    of: impl Fn(&'a T) -> (&'a String, f64) + 'a,
) -> impl Iterator<Item = (&'a str, f64)> {
    all.iter().filter_map(move |one| {
        let (name, mean_ns) = of(one);
        Some((name.as_str(), share(mean_ns, evidence.load.mean_ns)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::{Held, Layer};

    /// A cell with these layers (name, share).
    fn layers(depth: u32, layers: &[(&str, f64)]) -> Evidence {
        with(cell(depth, 400.0), |evidence| {
            evidence.device = None;
            let layer = |&(name, share): &(&str, f64)| Layer {
                name: name.into(),
                mean_ns: share * 4e5,
            };
            evidence.layers = layers.iter().map(layer).collect();
        })
    }

    #[test]
    fn layers_are_the_whole_time() {
        let all = layers(1, &[("guest, KVM and QEMU", 0.3), ("host: device", 0.7)]);
        let slices = slices(&all);
        assert!(unseen(&slices) < 1e-9);
        let largest = largest(&slices).unwrap();
        assert_eq!(largest.kind, Kind::Layer("host: device".into()));
    }

    #[test]
    fn without_layers_the_rest_is_unseen() {
        let some = with(layers(1, &[]), |evidence| {
            evidence.filters.push(Held {
                filter: "delay".into(),
                requests: 1,
                mean_ns: 4e4,
            });
        });
        // The threads work for 7.4 of 10 s, in which 0.99 requests are in flight.
        let slices = slices(&some);
        assert_eq!(slices.len(), 2);
        assert!((slices[1].share - 0.74 / 0.99).abs() < 1e-3, "{slices:?}");
        assert!((unseen(&slices) - (1.0 - 0.1 - 0.74 / 0.99)).abs() < 1e-3);
    }

    #[test]
    fn waiting_is_compared_with_the_other_side() {
        let waiting = |guest: f64, device: f64, waits: f64| {
            let all = layers(
                1,
                &[("guest, KVM and QEMU", guest), ("host: device", device)],
            );
            Waiting::of(&all, Side::Guest, &[waits]).unwrap()
        };
        let little = waiting(0.3, 0.7, 0.2);
        assert!(!little.is_largest && little.explains);
        let much = waiting(0.7, 0.3, 0.5);
        assert!(much.is_largest && much.explains);
        assert!((much.most - 0.5 / 0.99).abs() < 1e-3, "{much:?}");
        assert!(!waiting(0.9, 0.1, 0.3).explains);
        // A request waits for the guest only in the guest's layer.
        assert!((waiting(0.3, 0.7, 0.9).most - 0.3).abs() < 1e-9);
    }

    #[test]
    fn requests_in_their_queues_wait_for_the_server() {
        let all = layers(32, &[("guest, KVM and QEMU", 0.9), ("host: device", 0.1)]);
        let of = |side| Waiting::of(&all, side, &[0.5]).unwrap();
        assert!(of(Side::Server).is_largest && of(Side::Server).explains);
        let busy = layers(32, &[("guest, KVM and QEMU", 0.1), ("host: device", 0.9)]);
        let guest = Waiting::of(&busy, Side::Guest, &[0.5]).unwrap();
        assert!(!guest.is_largest);
    }

    #[test]
    fn one_thread_delays_all_requests_that_are_offered() {
        let four = layers(4, &[]);
        let most = |waits: &[f64]| Waiting::of(&four, Side::Guest, waits).unwrap().most;
        assert!((most(&[0.2]) - 0.2 / 0.99).abs() < 1e-3);
        assert!((most(&[0.2; 4]) - 0.2 / 0.99).abs() < 1e-3);
        let none = with(four, |evidence| evidence.load.requests = 0);
        assert_eq!(Waiting::of(&none, Side::Guest, &[0.2]), None);
    }
}
