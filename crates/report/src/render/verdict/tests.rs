use fathom_run::{Benchmark, Environment, RunKind};

use super::*;
use crate::analysis::{Distribution, HostClass, Overhead, RoundRow, Truth};
use crate::render::text::duration;

/// A run of layers, each with its mean and its mean in the slowest 1%, in us.
fn run(layers: &[(Layer, f64, f64)]) -> Analysis {
    let (mean, slow) = layers
        .iter()
        .fold((0.0, 0.0), |sum, row| (sum.0 + row.1, sum.1 + row.2));
    let row = |&(layer, us, tail): &(Layer, f64, f64)| LayerRow {
        layer,
        group: layer.describe().1,
        name: layer.describe().0,
        time: Distribution {
            count: 5000,
            mean: us * 1e3,
            ..Distribution::default()
        },
        share: us / mean,
        middle_mean: None,
        tail_mean: Some(tail * 1e3),
        tail_share: Some(tail / slow),
        negative: 0,
    };
    let exact = Exact {
        total: Distribution {
            count: 5000,
            mean: mean * 1e3,
            ..Distribution::default()
        },
        layers: layers.iter().map(row).collect(),
        truth: Truth {
            requests: 5000,
            joined: 5000,
            ..Truth::default()
        },
        ..Exact::default()
    };
    Analysis {
        kind: RunKind::Lab,
        title: String::new(),
        created: 0,
        scenario: None,
        environment: Environment::default(),
        disks: Vec::new(),
        rounds: vec![round("guest-read", "read", false, 0.0)],
        exact: Some(exact),
        wiki: None,
        calls: Vec::new(),
        locks: Vec::new(),
        qemu: Vec::new(),
        time_lines: Vec::new(),
        picture: None,
        overhead: Vec::new(),
        problems: Vec::new(),
    }
}

/// A benchmark's round; a round on the host is untraced.
fn round(name: &str, call: &str, on_host: bool, us: f64) -> RoundRow {
    let traced = if on_host {
        vec![]
    } else {
        vec!["guest".to_owned()]
    };
    let benchmark = Benchmark {
        operations: 5000,
        mean_ns: us * 1e3,
        call: call.into(),
        ..Benchmark::default()
    };
    RoundRow {
        name: name.into(),
        traced,
        on_host,
        benchmark: Some(benchmark),
    }
}

fn with_host(layers: &[(Layer, f64, f64)], us: f64) -> Analysis {
    let mut run = run(layers);
    run.rounds.push(round("host-pread", "pread", true, 1.0));
    run.rounds.push(round("host-read", "read", true, us));
    run
}

fn exact(run: &mut Analysis) -> &mut Exact {
    run.exact.as_mut().unwrap()
}

fn told(run: &Analysis) -> String {
    let pieces = sentence(run, duration).unwrap().into_iter();
    let pieces = pieces.map(|piece| match piece {
        Piece::Text(text) => text,
        Piece::Layer(_, name) => format!("[{name}]"),
    });
    pieces.collect()
}

use Layer::{GuestDevice, GuestSubmit, HostDevice, HostIo, HostSubmit, ServerPop, ServerWake};

#[test]
fn device_is_suspected_for_its_time_beyond_the_hosts() {
    let layers = [
        (GuestSubmit, 10.0, 20.0),
        (ServerWake, 13.0, 25.0),
        (HostSubmit, 2.0, 5.0),
        (HostDevice, 145.0, 900.0),
    ];
    assert_eq!(
        told(&with_host(&layers, 70.0)),
        "Suspect: the host's I/O, most of it [host: device], +77.00 us over the host alone, 77.0% of \
         what the guest adds. In the slowest 1%, the largest part is [host: device]: 94.7%."
    );
}

#[test]
fn what_the_host_alone_takes_as_well_is_nobodys_fault() {
    // The device takes most of the time, but it also does so without a guest.
    let layers = [
        (GuestSubmit, 3.0, 3.0),
        (ServerWake, 30.0, 40.0),
        (HostDevice, 71.0, 400.0),
    ];
    let text = told(&with_host(&layers, 70.0));
    assert_eq!(
        text,
        "Suspect: [kick: eventfd to server], +30.00 us over the host alone, 88.2% of what the \
         guest adds. In the slowest 1%, the largest part is [host: device]: 90.3%."
    );
    let alone = told(&run(&layers));
    assert!(
        alone.starts_with("Suspect: [host: device], 71.00 us, 68.3% of the mean."),
        "{alone}"
    );
}

#[test]
fn another_call_of_the_hosts_benchmark_is_no_measure() {
    let mut run = with_host(&[(GuestSubmit, 3.0, 3.0), (HostDevice, 97.0, 97.0)], 70.0);
    run.rounds.pop();
    assert!(told(&run).starts_with("Suspect: [host: device], 97.00 us, 97.0% of the mean."));
}

#[test]
fn no_layer_stands_out_where_the_next_takes_nearly_as_much() {
    let layers = [
        (GuestSubmit, 30.0, 30.0),
        (ServerWake, 32.0, 33.0),
        (HostDevice, 28.0, 35.0),
    ];
    assert_eq!(
        told(&run(&layers)),
        "No layer stands out. The greatest part is [kick: eventfd to server]: 32.00 us, 35.6% of \
         the mean. In the slowest 1%, none stands out."
    );
}

#[test]
fn no_layer_stands_out_of_many() {
    let layers = [
        (GuestSubmit, 30.0, 1.0),
        (ServerWake, 15.0, 1.0),
        (ServerPop, 20.0, 1.0),
        (HostDevice, 20.0, 1.0),
        (HostSubmit, 20.0, 1.0),
    ];
    assert!(told(&run(&layers)).starts_with("No layer stands out."));
}

#[test]
fn no_layer_stands_out_from_what_measuring_itself_makes() {
    let layers = [
        (GuestSubmit, 1.0, 1.0),
        (ServerWake, 8.0, 40.0),
        (HostDevice, 71.0, 80.0),
    ];
    let mut run = with_host(&layers, 70.0);
    assert!(told(&run).starts_with("Suspect: [kick"));
    run.overhead = vec![Overhead {
        traced: Vec::new(),
        traced_ns: 0.0,
        untraced_ns: 0.0,
        difference_ns: 9_000.0,
        low_ns: 0.0,
        high_ns: 0.0,
        pairs: 5,
    }];
    assert!(told(&run).starts_with("No layer stands out. The greatest part is [kick"));
    run.overhead.clear();
    exact(&mut run).truth.clock_error_ns = Some(8_500);
    assert!(told(&run).starts_with("No layer stands out."));
}

#[test]
fn a_guest_that_is_no_slower_has_no_suspect() {
    let layers = [(GuestSubmit, 1.0, 1.0), (HostDevice, 60.0, 60.0)];
    let text = told(&with_host(&layers, 70.0));
    assert_eq!(
        text,
        "The guest adds nothing to what the host alone takes: no layer stands out."
    );
}

#[test]
fn of_few_requests_nothing_is_said() {
    let layers = [(GuestSubmit, 1.0, 1.0), (HostDevice, 60.0, 60.0)];
    let mut few = run(&layers);
    exact(&mut few).total.count = FEW - 1;
    exact(&mut few).truth.joined = FEW - 1;
    assert_eq!(
        told(&few),
        "Too few requests were followed to suspect a layer: 99 of 5000."
    );
    let mut many_lost = run(&layers);
    exact(&mut many_lost).truth.requests = 10_001;
    assert!(told(&many_lost).starts_with("Too few requests"));
    exact(&mut few).total.count = 0;
    assert_eq!(sentence(&few, duration), None);
}

#[test]
fn a_tail_with_lost_events_is_not_judged() {
    let mut run = run(&[(GuestSubmit, 1.0, 1.0), (HostDevice, 60.0, 60.0)]);
    assert!(told(&run).contains("slowest 1%"));
    exact(&mut run).truth.lost = vec![("kvm".into(), 1)];
    assert!(!told(&run).contains("slowest 1%"));
}

#[test]
fn what_was_not_traced_within_the_suspect_is_said() {
    // If only the guest was watched, the device is everything that the host does.
    let layers = [(GuestSubmit, 1.0, 1.0), (GuestDevice, 150.0, 60.0)];
    let text = told(&with_host(&layers, 70.0));
    assert!(
        text.starts_with("Suspect: [device, as the guest sees it], +80.00 us over the host alone"),
        "{text}"
    );
    assert!(text.contains("The layers within it were not traced."));
    // The host's block layer was not watched: a device may be within.
    let mut unwatched = run(&[(GuestSubmit, 1.0, 1.0), (HostIo, 150.0, 60.0)]);
    assert!(!told(&unwatched).contains("not traced"));
    exact(&mut unwatched).truth.hosts = vec![(HostClass::Unknown, 5000)];
    assert!(told(&unwatched).contains("The layers within it were not traced."));
}
