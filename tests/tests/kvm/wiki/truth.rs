//! Compares the breakdown with a known truth.
//!
//! An injector puts a delay into one place and measures its length. The delay must be found in the
//! layer of that place, and in no other.

use std::fs;
use std::time::Duration;

use fathom_lab::experiment::wiki::{Injection, Place};
use fathom_lab::workload::Limit;
use fathom_report::analysis::{Joined, Layer};
use fathom_run::{Clock, Kind};
use fathom_testing::decide;
use serde_json::Value;

use super::{Bench, Done};

/// Long enough for its side effects, such as a vCPU that goes idle, and for the effects of other
/// programs on an emulated host, to be small in comparison.
const DELAY: Duration = Duration::from_millis(150);
/// Number of requests, half of which are delayed.
const REQUESTS: u64 = 40;
/// Share of the delay by which a layer may be off.
const TOLERANCE: f64 = 0.05;

const PLACES: [(Place, Layer); 4] = [
    (Place::Guest, Layer::GuestSubmit),
    (Place::Queue, Layer::ServerQueue),
    // The injector waits with the request before it submits the request to the kernel.
    (Place::Storage, Layer::HostSubmit),
    (Place::Notify, Layer::ServerNotify),
];

/// A busy machine can delay half of the requests in one layer, but not in the same layer again and
/// again.
pub fn delays_are_found_where_they_were_put(bench: &mut Bench) {
    for (place, layer) in PLACES {
        decide(|| attempt(bench, place, layer).unwrap());
    }
}

/// The delay of a filter is time that requests wait in Fathom's queue, and in no other layer.
pub fn a_filter_delays_in_the_queue(bench: &mut Bench) {
    const DELAY: Duration = Duration::from_millis(200);
    // Number of requests, all of which are delayed.
    const REQUESTS: u64 = 20;
    let done = bench.run(|options| {
        options.pairs_only = true;
        options.limit = Some(Limit::Operations(REQUESTS));
        options.filters = vec![format!("delay:read={}ms", DELAY.as_millis())];
    });
    let all = fathom_report::Options { slowest: 1000 };
    let analysis = fathom_report::analyse(&done.dir, &all).unwrap();
    let exact = analysis.exact.as_ref().expect("an exact breakdown");
    assert_eq!(exact.truth.joined, REQUESTS, "{:?}", exact.truth);
    let requests: Vec<&Joined> = exact.slowest.iter().collect();
    let delay = DELAY.as_nanos() as f64;
    let queue = median(&requests, time_in(Layer::ServerQueue));
    // The time is never shorter than the delay. A busy machine wakes the worker late.
    assert!(queue >= delay, "{queue} ns");
    let rest = whole(&requests) - queue;
    assert!(rest < queue / 4.0, "{rest} ns elsewhere, {queue} ns there");
    let round = done.run.rounds.iter().find(|one| one.name == "requests-1");
    let benchmark = round.unwrap().benchmark.as_ref().unwrap();
    assert!(
        done.run.title.contains("delay:read=200ms"),
        "{}",
        done.run.title
    );
    assert!(benchmark.mean_ns >= delay, "{benchmark:?}");
}

fn attempt(bench: &mut Bench, place: Place, layer: Layer) -> Result<(), String> {
    let delay = DELAY;
    let done = bench.run(|options| {
        options.pairs_only = true;
        options.limit = Some(Limit::Operations(REQUESTS));
        options.inject = Some(Injection { place, delay });
    });
    let measured = match place {
        Place::Guest => by_guest(&done),
        _ => by_server(&done, place),
    };
    assert!(
        measured >= DELAY.as_nanos() as f64,
        "{place}: {measured} ns"
    );
    check(&done, place, layer, measured)
}

/// Compares the medians of delayed and other requests, layer by layer.
fn check(done: &Done, place: Place, layer: Layer, measured: f64) -> Result<(), String> {
    let all = fathom_report::Options { slowest: 1000 };
    let analysis = fathom_report::analyse(&done.dir, &all).unwrap();
    let exact = analysis.exact.as_ref().expect("an exact breakdown");
    assert_eq!(exact.truth.joined, REQUESTS, "{place}: {:?}", exact.truth);
    // Every other request is delayed. Which half depends on what the guest has read before.
    let (mut delayed, mut others): (Vec<&Joined>, Vec<&Joined>) = exact
        .slowest
        .iter()
        .partition(|request| request.number % 2 == 0);
    if whole(&delayed) < whole(&others) {
        std::mem::swap(&mut delayed, &mut others);
    }
    for &one in Layer::ALL {
        let growth = median(&delayed, time_in(one)) - median(&others, time_in(one));
        let wanted = if one == layer { measured } else { 0.0 };
        if (growth - wanted).abs() >= TOLERANCE * measured {
            return Err(format!("{one:?} grew by {growth} ns, not by {wanted}"));
        }
    }
    Ok(())
}

fn median(requests: &[&Joined], time: impl Fn(&Joined) -> i64) -> f64 {
    let mut times: Vec<i64> = requests.iter().map(|request| time(request)).collect();
    times.sort_unstable();
    times[times.len() / 2] as f64
}

fn whole(requests: &[&Joined]) -> f64 {
    median(requests, |request| request.total)
}

fn time_in(layer: Layer) -> impl Fn(&Joined) -> i64 {
    move |request| {
        let times = request.layers.iter().filter(|(one, _)| *one == layer);
        times.map(|(_, ns)| ns).sum()
    }
}

/// Returns the injector's median, which `fathom serve --json` has printed at its end.
fn by_server(done: &Done, place: Place) -> f64 {
    let text = fs::read_to_string(done.dir.join("server.log")).unwrap();
    let outcome: Value = serde_json::from_str(&text).unwrap();
    let injected = &outcome["injected"];
    assert_eq!(injected["place"], place.to_string(), "{text}");
    injected["p50_ns"].as_f64().unwrap()
}

/// Returns the injector's median, from the events of delays that the guest's benchmark has written.
fn by_guest(done: &Done) -> f64 {
    let rounds = done.run.rounds.iter();
    let round = rounds.clone().find(|one| one.name == "requests-1").unwrap();
    let stream = round.streams.iter().find(|one| one.name == "benchmark");
    let stream = stream.unwrap();
    assert_eq!(stream.clock, Clock::GuestTsc);
    let (first, last) = (round.clocks.guest[0], *round.clocks.guest.last().unwrap());
    let ns = (last.monotonic_ns - first.monotonic_ns) as f64;
    let ns_per_tick = ns / (last.tsc - first.tsc) as f64;
    let events = round.open(&done.dir, stream).unwrap().map(Result::unwrap);
    let injected = events.filter(|event| event.kind == Kind::Injected);
    let mut ticks: Vec<u64> = injected.map(|event| event.args[1]).collect();
    ticks.sort_unstable();
    ticks[ticks.len() / 2] as f64 * ns_per_tick
}
