//! A disk in each situation for which a user asks for advice.

use super::{disk, own};
use crate::evidence::{
    Engine, Evidence, Filter, OwnThreads, Polling, Pool, SharedThreads, Storage, Tables, Threads,
    Verdict,
};
use crate::{Advice, Change, Outcome, advise};
use std::time::Duration;

fn with_threads(verdict: Verdict, threads: OwnThreads) -> Evidence {
    Evidence {
        threads: Threads::Own(threads),
        ..disk(verdict)
    }
}

#[track_caller]
fn changes(evidence: &Evidence) -> Vec<Change> {
    match advise(evidence) {
        Outcome::Changes(all) => all.into_iter().map(|advice| advice.change).collect(),
        Outcome::Nothing(reason) => panic!("nothing: {reason}"),
    }
}

#[track_caller]
fn only(evidence: &Evidence) -> Advice {
    match advise(evidence) {
        Outcome::Changes(mut all) if all.len() == 1 => all.remove(0),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn nothing(evidence: &Evidence) -> String {
    match advise(evidence) {
        Outcome::Nothing(reason) => reason,
        Outcome::Changes(all) => panic!("{all:?}"),
    }
}

#[test]
fn a_thread_that_never_polls_is_told_to_poll() {
    let asleep = |polling| with_threads(Verdict::Latency, OwnThreads { polling, ..own() });
    let advice = only(&asleep(Polling::Off));
    assert_eq!(advice.change, Change::PollAuto);
    assert_eq!(
        advice.change.command("vm1"),
        "fathom disk change vm1 poll=auto"
    );
    assert!(
        advice.why.contains("1.0 times for each request of 100 us"),
        "{}",
        advice.why
    );
    assert_eq!(
        changes(&asleep(Polling::Fixed(Duration::from_micros(5)))),
        [Change::PollAuto]
    );
    nothing(&asleep(Polling::Auto));
    nothing(&asleep(Polling::Fixed(Duration::from_millis(1))));
    // A wake-up is little of a long request.
    nothing(&Evidence {
        mean_us: 5000.0,
        ..asleep(Polling::Off)
    });
    // Polling takes the CPU time of others.
    let mut busy = asleep(Polling::Off);
    busy.host.free_cpus = 0.4;
    nothing(&busy);
}

#[test]
fn one_thread_for_four_queues_gets_help() {
    let busy = |threads| with_threads(Verdict::Thread, threads);
    let four = OwnThreads {
        sources: 4,
        cpu: 0.98,
        ..own()
    };
    let advice = only(&busy(four.clone()));
    assert_eq!(
        advice.change.command("vm1"),
        "fathom disk change vm1 iothreads=4"
    );
    let mut two_free = busy(four.clone());
    two_free.host.free_cpus = 1.9;
    assert_eq!(changes(&two_free), [Change::Threads(2)]);
    two_free.host.free_cpus = 0.9;
    assert!(nothing(&two_free).contains("no free CPU"));
    assert!(
        nothing(&busy(OwnThreads {
            sources: 1,
            ..four.clone()
        }))
        .contains("more queues")
    );
    let blocking = OwnThreads {
        engine: Engine::Threads,
        ..four
    };
    assert_eq!(
        changes(&busy(blocking)),
        [Change::Threads(4), Change::IoUring]
    );
}

#[test]
fn threads_that_share_one_pinned_cpu_are_released() {
    let pinned = OwnThreads {
        count: 4,
        sources: 4,
        cpu: 0.97,
        pinned: Some(1),
        ..own()
    };
    let advice = only(&with_threads(Verdict::Thread, pinned.clone()));
    assert_eq!(advice.change.command("vm1"), "fathom disk change vm1 cpus=");
    let shared = with_threads(Verdict::Latency, pinned.clone());
    assert_eq!(changes(&shared), [Change::AnyCpu]);
    // More threads on the same CPU do not help.
    let one = OwnThreads { count: 1, ..pinned };
    nothing(&with_threads(Verdict::Thread, one));
}

#[test]
fn a_tiny_table_cache_on_a_large_image_grows() {
    let small = Evidence {
        map: 0.7,
        tables: Some(Tables {
            cache: 64 << 10,
            reads: 0.9,
        }),
        ..disk(Verdict::Tables)
    };
    let advice = only(&small);
    assert_eq!(
        advice.change.command("vm1"),
        "fathom disk change vm1 metadata-cache=128M"
    );
    assert_eq!(advice.change.price(), "memory: up to 128M");
    // Clusters are smaller than 64 KiB.
    let larger = Evidence {
        tables: Some(Tables {
            cache: 128 << 20,
            reads: 0.9,
        }),
        ..small.clone()
    };
    assert_eq!(changes(&larger), [Change::TableCache(512 << 20)]);
    let mut full = small.clone();
    full.host.free_memory = 100 << 10;
    nothing(&full);
    // The time goes to the allocation of clusters.
    nothing(&Evidence {
        tables: Some(Tables {
            cache: 64 << 10,
            reads: 0.01,
        }),
        ..small.clone()
    });
    let slower = Evidence {
        verdict: Verdict::Latency,
        map: 0.45,
        ..small
    };
    assert_eq!(changes(&slower), [Change::TableCache(128 << 20)]);
    nothing(&Evidence { map: 0.1, ..slower });
}

fn throttle(options: &[(&str, &str)], held: f64) -> Filter {
    let options: Vec<_> = { options.iter() }
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    Filter {
        name: "throttle".into(),
        text: "throttle".into(),
        options,
        held: Some(held),
    }
}

#[test]
fn a_forgotten_throttle_is_found() {
    let limits = [
        ("bps-read-max", "5M"),
        ("iops-size", "4k"),
        ("iops-total", "500"),
    ];
    let held = Evidence {
        filters: vec![throttle(&limits, 0.97)],
        ..disk(Verdict::Filter)
    };
    let advice = only(&held);
    assert_eq!(
        advice.change.command("vm1"),
        "fathom set vm1 throttle bps-read-max= iops-total="
    );
    assert!(advice.why.contains("97%"), "{}", advice.why);
    let second = Evidence {
        filters: vec![throttle(&limits, 0.0), throttle(&[("iops-read", "9")], 0.5)],
        ..held.clone()
    };
    let advice = only(&second);
    assert_eq!(
        advice.change.command("vm1"),
        "fathom set vm1 throttle#2 iops-read="
    );
    // The limits of a group are those of other disks, too.
    let group = [("group", "g"), ("iops-total", "500")];
    let reason = nothing(&Evidence {
        filters: vec![throttle(&group, 0.97)],
        ..held.clone()
    });
    assert!(reason.contains("fathom group list"), "{reason}");
    let delay = Filter {
        name: "delay".into(),
        held: None,
        ..throttle(&[("read", "5ms")], 0.0)
    };
    nothing(&Evidence {
        filters: vec![delay],
        ..held
    });
}

#[test]
fn a_disk_leaves_a_pool_with_a_greedy_neighbour() {
    let shared = SharedThreads {
        pool: "small".into(),
        others: 0.93,
        busiest: Some("vm2".into()),
        pools: vec![
            Pool {
                name: "full".into(),
                cpu: 0.9,
            },
            Pool {
                name: "calm".into(),
                cpu: 0.1,
            },
        ],
    };
    let pooled = |shared: &SharedThreads| Evidence {
        threads: Threads::Shared(shared.clone()),
        ..disk(Verdict::Thread)
    };
    let all = changes(&pooled(&shared));
    assert_eq!(all, [Change::Pool("calm".into()), Change::OwnThreads]);
    let commands: Vec<_> = all.iter().map(|change| change.command("vm1")).collect();
    assert_eq!(commands[0], "fathom disk change vm1 pool=calm");
    assert_eq!(commands[1], "fathom disk change vm1 pool=");
    let alone = SharedThreads {
        pools: Vec::new(),
        ..shared.clone()
    };
    let advice = only(&pooled(&alone));
    assert!(
        advice
            .why
            .contains("93% of the requests of pool small, most of them 'vm2'")
    );
    // The disk itself is the one that keeps the pool busy.
    let own_load = SharedThreads {
        others: 0.2,
        ..shared
    };
    assert!(nothing(&pooled(&own_load)).contains("most of it is this disk's"));
}

#[test]
fn sequential_reads_from_a_remote_server_are_read_ahead() {
    let remote = Evidence {
        storage: Storage::Server,
        mean_us: 20_000.0,
        device: 0.98,
        forward: Some(1.0),
        filters: vec![Filter {
            text: "log:path='a b'".into(),
            ..throttle(&[], 0.0)
        }],
        ..disk(Verdict::Latency)
    };
    let advice = only(&remote);
    assert_eq!(
        advice.change.command("vm1"),
        r#"fathom disk change vm1 'filters=["log:path='\''a b'\''","readahead:size=1M"]'"#
    );
    let reason = nothing(&Evidence {
        forward: Some(0.5),
        ..remote.clone()
    });
    assert!(reason.contains("server of the storage"), "{reason}");
    nothing(&Evidence {
        forward: None,
        ..remote.clone()
    });
    nothing(&Evidence {
        reads: 0.5,
        ..remote.clone()
    });
    nothing(&Evidence {
        in_flight: 32.0,
        ..remote.clone()
    });
    let already = Filter {
        name: "readahead".into(),
        ..throttle(&[], 0.0)
    };
    nothing(&Evidence {
        filters: vec![already],
        ..remote
    });
}

#[test]
fn nothing_helps_if_nothing_is_wrong() {
    assert!(nothing(&disk(Verdict::Client)).contains("waits for its client"));
    assert!(nothing(&disk(Verdict::Latency)).contains("no part"));
    assert!(nothing(&disk(Verdict::Idle)).contains("no requests"));
    assert!(nothing(&disk(Verdict::Unknown)).contains("a guess"));
}

#[test]
fn nothing_helps_if_the_device_is_the_limit() {
    let deep = Evidence {
        mean_us: 3200.0,
        device: 0.97,
        in_flight: 32.0,
        forward: Some(1.0),
        ..with_threads(
            Verdict::Latency,
            OwnThreads {
                polling: Polling::Off,
                sleeps: 0.9,
                ..own()
            },
        )
    };
    assert!(nothing(&deep).contains("faster device"));
}
