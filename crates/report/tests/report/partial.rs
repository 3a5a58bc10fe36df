//! Runs that watched only a part of the path, or whose clocks are not related by KVM's offset.

use crate::support;

use crate::support::sim::{Plan, Truth};
use crate::support::{Simulated, Watches, difference, joined};
use fathom_report::analysis::{Analysis, Delivery, Layer, Point};
use fathom_report::render::terminal::{Style, report};
use fathom_run::{Clock, Event, Kind, RunKind};

fn plan(seed: u64, depth: u64) -> Plan {
    Plan::new(seed, depth, 1000)
}

const UNTOLD: Watches = Watches {
    offset: -987_654_321_012,
    ratio: None,
    told: false,
    guest_ppm: 37,
};

/// Returns the truth without some points.
fn without(truth: &Truth, points: &[Point]) -> Truth {
    let mut truth = truth.clone();
    truth.points.retain(|(point, _)| !points.contains(point));
    truth
}

/// Returns the requests that differ from the truth by more than `error`.
fn wrong(simulated: &Simulated, analysis: &Analysis, error: i64, unseen: &[Point]) -> Vec<String> {
    let exact = analysis.exact.as_ref().expect("a breakdown");
    let mut truths: Vec<Truth> = simulated
        .truths
        .iter()
        .map(|truth| without(truth, unseen))
        .collect();
    truths.sort_by_key(|truth| (truth.points[0].1, truth.offset));
    let all = joined(exact);
    assert_eq!(all.len(), truths.len(), "{:?}", analysis.problems);
    let pairs = all.iter().zip(&truths);
    pairs
        .filter_map(|(joined, truth)| difference(joined, truth, error))
        .collect()
}

#[test]
fn without_kvms_offset_causality_relates_the_clocks() {
    for (depth, most) in [(1, 15_000), (8, 60_000)] {
        let simulated = Simulated::new(plan(1, depth), UNTOLD);
        let analysis = simulated.analyse();
        let truth = analysis.exact.as_ref().unwrap().truth.clone();
        assert!(
            truth.clock_method.starts_with("causality over"),
            "{truth:?}"
        );
        let error = truth.clock_error_ns.unwrap();
        assert!(error > 0 && error < most, "depth {depth}: {error}");
        assert_eq!(
            (truth.violations, truth.unmatched),
            (0, 0),
            "{:?}",
            analysis.problems
        );
        let wrong = wrong(&simulated, &analysis, error + 2, &[]);
        // At depth 1 no mistake is possible. With more requests in flight, an error of the length
        // of an interrupt's way leaves some requests that either of two handlers could have served.
        let allowed = if depth == 1 {
            0
        } else {
            simulated.truths.len() / 10
        };
        assert!(
            wrong.len() <= allowed,
            "{} wrong: {}",
            wrong.len(),
            wrong[0]
        );
    }
}

#[test]
fn an_offset_that_moved_is_not_used() {
    let mut simulated = Simulated::new(
        plan(2, 1),
        Watches {
            told: true,
            ..UNTOLD
        },
    );
    let offset = simulated.run.rounds[0]
        .clocks
        .guest_offset
        .as_mut()
        .unwrap();
    offset.after += 5;
    simulated.rewrite();
    let told = |simulated: &Simulated, what: &str| {
        let analysis = simulated.analyse();
        assert!(
            analysis.problems.iter().any(|line| line.contains(what)),
            "{:?}",
            analysis.problems
        );
        let truth = analysis.exact.unwrap().truth;
        assert!(truth.clock_method.starts_with("causality"), "{truth:?}");
    };
    told(&simulated, "offset changed during the round");

    let offset = simulated.run.rounds[0]
        .clocks
        .guest_offset
        .as_mut()
        .unwrap();
    offset.after = offset.before;
    let time = simulated.file("kvm")[50].time;
    let written = Event::new(time, Kind::KvmWriteTscOffset, 0, 601, &[0, 1, 2]);
    simulated.file("kvm").insert(50, written);
    simulated.rewrite();
    told(&simulated, "KVM wrote the TSC offset");
}

/// Only the guest and the server were watched, as under TCG.
#[test]
fn without_kvm_the_ways_between_are_one_layer_each() {
    let unseen = [
        Point::Exit,
        Point::Signal,
        Point::Interrupt,
        Point::Woken,
        Point::Entry,
    ];
    let mut simulated = Simulated::new(plan(3, 1), UNTOLD);
    simulated.without("kvm");
    simulated.rewrite();
    let analysis = simulated.analyse();
    let exact = analysis.exact.as_ref().unwrap();
    let error = exact.truth.clock_error_ns.unwrap();
    assert!(error < 60_000, "{error}");
    let wrong = wrong(&simulated, &analysis, error + 2, &unseen);
    assert!(wrong.is_empty(), "{} wrong: {}", wrong.len(), wrong[0]);
    let passed = |layer| exact.layers.iter().any(|row| row.layer == layer);
    assert!(passed(Layer::KickPath) && passed(Layer::InterruptPath));
    assert!(!passed(Layer::Unattributed) && !passed(Layer::KickExit));
    assert!(
        analysis
            .problems
            .iter()
            .any(|line| line.contains("were not watched"))
    );
}

/// For QEMU or qemu-storage-daemon, system calls show when it woke, submitted and had the result.
/// Where they leave a doubt, the points are missing.
#[test]
fn a_server_without_stamps_is_told_by_its_calls() {
    let mut simulated = Simulated::new(plan(6, 1), Watches::default());
    simulated.with_calls();
    simulated.rewrite();
    let cached = |truth: &Truth| !truth.points.iter().any(|(p, _)| *p == Point::HostIssue);
    let unseen = [Point::Pop, Point::Map, Point::Used];
    let inside = [Point::Wake, Point::Device, Point::Result];
    for truth in &mut simulated.truths {
        *truth = without(truth, &unseen);
        if cached(truth) {
            *truth = without(truth, &inside);
        }
    }
    let analysis = simulated.analyse();
    let truth = &analysis.exact.as_ref().unwrap().truth;
    assert_eq!((truth.incomplete, truth.violations), (0, 0), "{truth:?}");
    let differing = wrong(&simulated, &analysis, 0, &[]);
    assert!(differing.is_empty(), "{differing:#?}");
    let rows = &analysis.exact.as_ref().unwrap().layers;
    let passed = |layer| {
        rows.iter()
            .any(|row| row.layer == layer && row.time.max > 0)
    };
    for layer in [
        Layer::ServerWake,
        Layer::ServerTake,
        Layer::HostSubmit,
        Layer::HostReap,
        Layer::ServerAnswer,
    ] {
        assert!(passed(layer), "{layer:?}");
    }

    // Every wait returns twice: which return was for the request is unknown.
    let waits = |event: &&Event| event.args[0] == 271 && event.kind == Kind::SysExit;
    let ticks = |event: &Event, kind, later: u64| Event {
        time: event.time + 3 * later,
        kind,
        ..*event
    };
    let file = simulated.file("io-calls");
    let again: Vec<Event> = file
        .iter()
        .filter(waits)
        .flat_map(|wait| {
            let enter = ticks(wait, Kind::SysEnter, 1);
            [enter, ticks(wait, Kind::SysExit, 2)]
        })
        .collect();
    file.extend(again);
    file.sort_by_key(|event| event.time);
    simulated.rewrite();
    let analysis = simulated.analyse();
    let unseen = [Point::Wake, Point::Result];
    let differing = wrong(&simulated, &analysis, 0, &unseen);
    assert!(differing.is_empty(), "{differing:#?}");
}

/// A disk without MSI-X: QEMU raises a pin of the IO-APIC for the disk, as for its timer.
#[test]
fn a_legacy_interrupt_gives_the_same_points() {
    const PIN: u64 = 11;
    for depth in [1, 8] {
        let mut simulated = Simulated::new(plan(7, depth), Watches::default());
        let mut pins = Vec::new();
        for event in simulated.file("kvm").drain(..) {
            let pin = |gsi, level, later: u64| Event {
                time: event.time + 3 * later,
                kind: Kind::KvmSetIrq,
                ..Event::new(0, Kind::KvmSetIrq, event.cpu, event.tid, &[gsi, level, 0])
            };
            match event.kind {
                Kind::KvmMsiSetIrq => {
                    let mut timer = pin(0, 1, 0);
                    timer.time -= 60;
                    pins.extend([timer, pin(PIN, 1, 0), pin(PIN, 0, 40)]);
                }
                _ => pins.push(event),
            }
        }
        pins.sort_by_key(|event| event.time);
        *simulated.file("kvm") = pins;
        for event in simulated.file("guest") {
            if event.kind == Kind::VringInterrupt {
                event.args[0] = PIN;
            }
        }
        let disk = &mut simulated.run.disks[0];
        disk.msi.clear();
        disk.guest_irqs = vec![PIN];
        simulated.run.rounds[0].streams[2].events = simulated.files[2].2.len() as u64;
        simulated.rewrite();
        let analysis = simulated.analyse();
        let truth = &analysis.exact.as_ref().unwrap().truth;
        let bad = (truth.incomplete, truth.inconsistent, truth.violations);
        assert_eq!(bad, (0, 0, 0), "{:?}", analysis.problems);
        let differing = wrong(&simulated, &analysis, 0, &[]);
        assert!(differing.is_empty(), "{differing:#?}");
        assert!(analysis.problems.iter().any(|line| line.contains("pin 11")));
        let rows = &analysis.wiki.as_ref().unwrap().cumulative;
        assert!(rows.iter().any(|(name, ..)| name == "Host kvm.ko"));
    }
}

#[test]
fn the_guest_alone_sees_one_device() {
    let mut simulated = Simulated::new(plan(4, 1), UNTOLD);
    for name in ["kvm", "block", "fathom"] {
        simulated.without(name);
    }
    simulated.run.kind = RunKind::Guest;
    simulated.run.rounds[0].clocks.host.clear();
    simulated.rewrite();
    let analysis = simulated.analyse();
    let exact = analysis.exact.unwrap();
    assert_eq!(exact.truth.joined, 1000);
    assert_eq!(analysis.problems, Vec::<String>::new());
    let layers: Vec<Layer> = exact.layers.iter().map(|row| row.layer).collect();
    let guests = [
        Layer::GuestSubmit,
        Layer::GuestBatch,
        Layer::GuestDevice,
        Layer::GuestBottomHalf,
        Layer::GuestReturn,
    ];
    assert_eq!(layers, guests);
    for (joined, truth) in joined(&exact).iter().zip(&simulated.truths) {
        let at = |point| truth.points.iter().find(|(p, _)| *p == point).unwrap().1;
        let device = joined
            .layers
            .iter()
            .find(|(layer, _)| *layer == Layer::GuestDevice);
        let real = at(Point::Handler) - at(Point::Kick);
        let off = (device.unwrap().1 - real).abs();
        assert!(off <= 2 + real / 10_000, "{off}"); // the guest's own second is 37 ppm off
    }
}

#[test]
fn the_host_alone_sees_from_the_kick_to_the_interrupt() {
    for depth in [1, 16] {
        let mut simulated = Simulated::new(plan(5, depth), Watches::default());
        simulated.without("bench");
        simulated.without("guest");
        simulated.run.kind = RunKind::Host;
        simulated.rewrite();
        let analysis = simulated.analyse();
        let exact = analysis.exact.unwrap();
        assert_eq!((exact.truth.requests, exact.truth.unmatched), (1000, 0));
        let mut truths = simulated.truths.clone();
        for joined in joined(&exact) {
            let of = |truth: &Truth, point| truth.points.iter().find(|(p, _)| *p == point).copied();
            let pop =
                |points: &[(Point, i64)]| points.iter().find(|(p, _)| *p == Point::Pop).unwrap().1;
            let found = truths.iter().position(|truth| {
                truth.offset == joined.offset
                    && of(truth, Point::Pop).unwrap().1 == pop(&joined.points) + joined.start
            });
            let truth = truths.swap_remove(found.expect("a true request"));
            assert_eq!(joined.host, truth.host);
            for &(point, at) in &joined.points {
                let truly = of(&truth, point).map(|(_, at)| at);
                // The kick of a request is known only if one request is in flight at a time.
                let known = depth == 1
                    || !matches!(
                        point,
                        Point::Exit | Point::Signal | Point::Wake | Point::Interrupt
                    );
                if known {
                    assert_eq!(truly, Some(at + joined.start), "{point:?}");
                }
            }
            if depth == 1 {
                assert_eq!(joined.delivery, Delivery::Kicked);
                assert_eq!(joined.points[0].0, Point::Exit);
                assert_eq!(joined.points.last().unwrap().0, Point::Interrupt);
            }
        }
    }
}

/// A server that polls has seen its last kick long before most requests.
#[test]
fn a_disk_recorded_at_its_server_adds_up() {
    let plan = Plan {
        polling: 100_000,
        ..plan(7, 4)
    };
    let mut simulated = Simulated::new(plan, Watches::default());
    for name in ["bench", "guest", "kvm"] {
        simulated.without(name);
    }
    simulated.run.kind = RunKind::Host;
    simulated.run.scenario = None;
    simulated.run.rounds[0].benchmark = None;
    simulated.run.disks[0].device = "fathom".into();
    simulated.rewrite();
    let analysis = simulated.analyse();
    let exact = analysis.exact.as_ref().unwrap();
    assert!(exact.truth.polled > 0);
    let rows = &analysis.wiki.as_ref().unwrap().cumulative;
    let (_, ns, _) = rows.iter().find(|(name, ..)| name == "Fathom").unwrap();
    assert!(
        *ns <= exact.total.mean + 1.0,
        "{ns} of {}",
        exact.total.mean
    );
    let problems = &analysis.problems;
    assert!(!problems.iter().any(|one| one.contains("Impossible")));
    let text = report(&analysis, Style::default());
    assert!(!text.contains("QEMU virtio"), "{text}");
}

#[test]
fn without_a_benchmark_each_bio_is_a_request() {
    let mut simulated = Simulated::new(plan(6, 8), Watches::default());
    simulated.without("bench");
    simulated.run.kind = RunKind::Joined;
    simulated.rewrite();
    let analysis = simulated.analyse();
    let wrong = wrong(&simulated, &analysis, 0, &[Point::Call, Point::Return]);
    assert!(wrong.is_empty(), "{}", wrong[0]);
}

#[test]
fn a_benchmark_by_the_guests_other_clock() {
    let watches = Watches::default();
    let mut simulated = Simulated::new(plan(7, 4), watches);
    let to_monotonic = |tsc: u64| {
        let host = tsc.wrapping_sub(watches.offset as u64);
        (host - watches.host_tsc(0)) / 3 - 500_000_000
    };
    let bench = simulated.file("bench");
    *bench = bench
        .iter()
        .map(|event| support::with_clock(event, to_monotonic))
        .collect();
    simulated.files[0].1 = Clock::GuestMonotonic;
    simulated.run.rounds[0].streams[0].clock = Clock::GuestMonotonic;
    simulated.rewrite();
    let analysis = simulated.analyse();
    let wrong = wrong(&simulated, &analysis, 1, &[]);
    assert!(wrong.is_empty(), "{}", wrong[0]);
}

#[test]
fn requests_that_cannot_be_told_apart_are_ambiguous() {
    let simulated = Simulated::new(
        Plan {
            places: 20,
            ..plan(8, 32)
        },
        Watches::default(),
    );
    let analysis = simulated.analyse();
    let truth = &analysis.exact.as_ref().unwrap().truth;
    assert_eq!(truth.unmatched, 0, "{:?}", analysis.problems);
    assert!(truth.ambiguous > 500);
    let wrong = wrong(&simulated, &analysis, 0, &[]);
    assert!((wrong.len() as u64) < truth.ambiguous);
    assert!(
        analysis
            .problems
            .iter()
            .any(|line| line.contains("more than one possible"))
    );
}

/// Flushes have no offset: two at once are ambiguous.
#[test]
fn flushes_at_once_are_ambiguous() {
    let simulated = Simulated::new(
        Plan {
            flushes: 40,
            ..plan(9, 8)
        },
        Watches::default(),
    );
    let analysis = simulated.analyse();
    let truth = &analysis.exact.as_ref().unwrap().truth;
    assert!(truth.ambiguous > 50, "{truth:?}");
    assert!(truth.unmatched < 10, "{truth:?}");
}

#[test]
fn a_device_that_is_not_identified_is_not_guessed() {
    let mut simulated = Simulated::new(plan(10, 1), Watches::default());
    let disk = &mut simulated.run.disks[0];
    disk.doorbells.clear();
    disk.kick_eventfds.clear();
    disk.identified_by = None;
    simulated.rewrite();
    let analysis = simulated.analyse();
    let wrong = wrong(&simulated, &analysis, 0, &[Point::Exit, Point::Signal]);
    assert!(wrong.is_empty(), "{}", wrong[0]);
    assert!(
        analysis
            .problems
            .iter()
            .any(|line| line.contains("doorbells are not known"))
    );
}
