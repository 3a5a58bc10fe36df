//! Laws that hold for any evidence.

use crate::evidence::{
    Engine, Evidence, Filter, Host, OwnThreads, Polling, Pool, SharedThreads, Storage, Tables,
    Threads, Verdict,
};
use crate::{MOST, Outcome, advise};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use std::time::Duration;

/// The options that a change may have. The cache mode is not among them, nor is any other option on
/// which durability depends.
const OPTIONS: [&str; 7] = [
    "filters",
    "iothreads",
    "cpus",
    "pool",
    "metadata-cache",
    "aio",
    "poll",
];

fn verdict() -> impl Strategy<Value = Verdict> {
    use Verdict::{Client, Filter, Frozen, Idle, Latency, Stuck, Tables, Thread, Unknown};
    let quiet = vec![Idle, Frozen, Stuck, Client, Unknown];
    prop_oneof![3 => select(vec![Filter, Thread, Tables, Latency]), 1 => select(quiet)]
}

/// Mostly values that make rules hold.
fn figure(most: f64) -> impl Strategy<Value = f64> {
    let odd = vec![
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -1.0,
        f64::MAX,
        0.0,
    ];
    prop_oneof![4 => 0.0..most, 1 => any::<f64>(), 1 => select(odd)]
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..1u64 << 42, 1 => any::<u64>()]
}

fn polling() -> impl Strategy<Value = Polling> {
    let fixed = (0..200u64).prop_map(|us| Polling::Fixed(Duration::from_micros(us)));
    prop_oneof![1 => Just(Polling::Auto), 2 => Just(Polling::Off), 1 => fixed]
}

prop_compose! {
    fn own()(
        count in 1..300u16, cpu in figure(4.0), pinned in option::of(0..5u16),
        sources in any::<u16>(), polling in polling(), sleeps in figure(3.0),
        engine in select(vec![Engine::IoUring, Engine::Native, Engine::Threads]),
    ) -> Threads {
        Threads::Own(OwnThreads { count, cpu, pinned, sources, polling, sleeps, engine })
    }
}

prop_compose! {
    fn shared()(
        others in figure(1.0), busiest in option::of("[a-z]{1,3}"),
        pools in vec(("[a-z]{1,3}", figure(1.0)), 0..4),
    ) -> Threads {
        let pools = pools.into_iter().map(|(name, cpu)| Pool { name, cpu }).collect();
        Threads::Shared(SharedThreads { pool: "p".into(), others, busiest, pools })
    }
}

prop_compose! {
    fn filter()(
        name in select(vec!["throttle", "delay", "readahead", "cow"]),
        keys in vec(select(vec!["iops-total", "bps-read-max", "group", "iops-size"]), 0..4),
        held in option::of(figure(1.0)),
    ) -> Filter {
        let options = keys.into_iter().map(|key| (key.to_owned(), "5".to_owned())).collect();
        Filter { name: name.into(), text: name.into(), options, held }
    }
}

prop_compose! {
    fn evidence()(
        verdict in verdict(), size in bytes(),
        storage in select(vec![Storage::File, Storage::Server, Storage::Memory]),
        shares in [figure(1.0), figure(1.0), figure(1.0)], forward in option::of(figure(1.0)),
        mean_us in figure(30_000.0), in_flight in figure(8.0),
        threads in prop_oneof![own(), shared()],
        tables in option::of((bytes(), figure(2.0))),
        filters in vec(filter(), 0..6), free_cpus in figure(8.0), free_memory in bytes(),
    ) -> Evidence {
        let [map, device, reads] = shares;
        let tables = tables.map(|(cache, reads)| Tables { cache, reads });
        let host = Host { free_cpus, free_memory };
        Evidence {
            verdict, size, storage, mean_us, map, device, in_flight, reads, forward, threads,
            tables, filters, host,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    #[test]
    fn any_evidence_has_few_harmless_changes_or_a_reason(evidence in evidence()) {
        let outcome = advise(&evidence);
        prop_assert_eq!(&advise(&evidence), &outcome);
        let all = match outcome {
            Outcome::Nothing(reason) => {
                prop_assert!(!reason.is_empty() && !reason.contains('\n'));
                return Ok(());
            }
            Outcome::Changes(all) => all,
        };
        prop_assert!((1..=MOST).contains(&all.len()));
        for advice in &all {
            let change = &advice.change;
            prop_assert!(OPTIONS.contains(&change.option()), "{:?}", change);
            let command = change.command("vm1");
            prop_assert!(command.starts_with("fathom disk change vm1 ") || command.starts_with("fathom set vm1 throttle"));
            for text in [&advice.why, &change.title(), &change.price(), &command] {
                prop_assert!(!text.is_empty() && !text.contains('\n'), "{:?}", text);
            }
            prop_assert_eq!(all.iter().filter(|other| other.change == *change).count(), 1);
        }
    }

    #[test]
    fn no_change_is_offered_if_the_disk_is_not_the_limit(
        evidence in evidence(),
        verdict in select(vec![
            Verdict::Idle, Verdict::Frozen, Verdict::Stuck, Verdict::Client, Verdict::Unknown,
        ]),
    ) {
        let quiet = Evidence { verdict, ..evidence };
        prop_assert!(matches!(advise(&quiet), Outcome::Nothing(_)));
    }

    #[test]
    fn no_thread_is_added_without_a_free_cpu(evidence in evidence(), free in 0.0..1.0f64) {
        let mut busy = evidence;
        busy.host.free_cpus = free;
        if let Outcome::Changes(all) = advise(&busy) {
            for advice in all {
                let option = advice.change.option();
                prop_assert!(!["iothreads", "cpus", "poll"].contains(&option), "{:?}", advice);
            }
        }
    }
}
