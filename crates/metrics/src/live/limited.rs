//! Suspects what limits a disk in an interval, by the rules that judge experiments, too.

use super::sample::{DiskSample, Limiter, LimiterKind, WorkerSample};
use fathom_limiter::layers;
use fathom_run::evidence::{Evidence, Held, Layer, Load, ThreadRole, ThreadTime};

/// Filters that delay requests. Others change or count them.
const HOLDING: [&str; 4] = ["delay", "throttle", "pause", "fault"];

/// Judges an interval of a disk. The field `limiter` of the sample is not used.
pub fn limiter(disk: &DiskSample) -> Limiter {
    let (kind, text) = state(disk).unwrap_or_else(|| judge(disk));
    Limiter { kind, text }
}

/// Returns the limiter of a disk without requests.
pub fn idle() -> Limiter {
    Limiter {
        kind: LimiterKind::Idle,
        text: "idle".to_owned(),
    }
}

/// Returns the state of a disk for which no request has completed.
fn state(disk: &DiskSample) -> Option<(LimiterKind, String)> {
    if disk.frozen {
        let text = "frozen: requests wait until 'fathom disk thaw'".to_owned();
        return Some((LimiterKind::Frozen, text));
    }
    if disk.all.requests > 0 {
        return None;
    }
    Some(match disk.in_flight {
        0 => (LimiterKind::Idle, idle().text),
        count => {
            let by = holding(&disk.filters);
            let by = by.map_or_else(String::new, |filters| format!("; filter {filters}"));
            let text = format!("stuck: {count} in flight, none answered{by}");
            (LimiterKind::Stuck, text)
        }
    })
}

fn judge(disk: &DiskSample) -> (LimiterKind, String) {
    let verdict = fathom_limiter::judge(&evidence(disk));
    let kind = match verdict.rule() {
        Some("filter") => LimiterKind::Filter,
        Some("thread") => LimiterKind::Thread,
        Some("tables") => LimiterKind::Tables,
        Some("client") => LimiterKind::Client,
        Some("latency") => LimiterKind::Latency,
        _ => LimiterKind::Unknown,
    };
    (kind, verdict.line())
}

/// Returns what a sample shows of the disk's requests, its stages and its threads.
fn evidence(disk: &DiskSample) -> Evidence {
    let mean_ns = disk.all.mean_us.unwrap_or(0.0) * 1e3;
    let stage = |name: &str| Some(disk.all.stages_us.get(name)? * 1e3);
    let filters = holding(&disk.filters).zip(stage("queue"));
    let storage = |name: &str| match name == "device" && disk.image.starts_with("nbd") {
        true => layers::NBD.to_owned(),
        false => layers::of_stage(name),
    };
    let stages = layers::STAGES.iter();
    let layers = stages.filter_map(|&name| {
        let mean_ns = stage(name)?;
        Some(Layer {
            name: storage(name),
            mean_ns,
        })
    });
    Evidence {
        seconds: disk.seconds,
        // The disk sees all of its requests, and does not know how many the client could keep.
        load: Load {
            requests: disk.all.requests,
            bytes: disk.all.bytes,
            mean_ns,
            ..Load::default()
        },
        threads: threads(disk),
        filters: { filters.into_iter() }
            .map(|(filter, mean_ns)| Held {
                filter,
                requests: disk.all.requests,
                mean_ns,
            })
            .collect(),
        layers: layers.collect(),
        ..Evidence::default()
    }
}

/// Returns the disk's workers, or the busiest thread of its pool.
fn threads(disk: &DiskSample) -> Vec<ThreadTime> {
    let seconds = |percent: f64| percent / 100.0 * disk.seconds;
    let thread = |name: String, cpu: f64, polling: f64| ThreadTime {
        name,
        role: ThreadRole::Io,
        cpu: seconds(cpu),
        polls: polling > 0.0,
        polled: Some(seconds(polling.min(cpu))),
        ..ThreadTime::default()
    };
    let of_worker = |(number, worker): (usize, &WorkerSample)| {
        let name = format!("worker {number}");
        Some(thread(name, worker.cpu_percent?, worker.polling_percent))
    };
    let workers = disk.workers.iter().enumerate().filter_map(of_worker);
    let pool = disk.pool.as_ref().zip(disk.pool_cpu_percent);
    // The thread polls for all disks of the pool at once.
    let pool = pool.map(|(pool, cpu)| thread(format!("pool {pool}"), cpu, disk.polling_percent));
    workers.chain(pool).collect()
}

/// Names the filters that delay requests, as far as known.
fn holding(filters: &[String]) -> Option<String> {
    let name = |filter: &String| filter.split(':').next().unwrap_or_default().to_owned();
    let may: Vec<&str> = { filters.iter() }
        .filter(|filter| HOLDING.contains(&&*name(filter)))
        .map(String::as_str)
        .collect();
    let all = match may.is_empty() {
        true => filters.join(" and "),
        false => may.join(" and "),
    };
    (!all.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::sample::Figures;

    /// Returns a disk with 1000 requests of `mean_us` in a second, and stages in microseconds.
    fn disk(mean_us: f64, stages: &[(&str, f64)]) -> DiskSample {
        let stages = stages.iter();
        DiskSample {
            name: "a".into(),
            image: "/srv/a.img".into(),
            format: "raw".into(),
            engine: "io_uring".into(),
            size: 1 << 30,
            read_only: false,
            frozen: false,
            pool: None,
            pid: 1,
            filters: Vec::new(),
            front_end: None,
            nbd_clients: 0,
            fuse_opens: 0,
            seconds: 1.0,
            restarted: false,
            all: Figures {
                requests: 1000,
                bytes: 4096 * 1000,
                mean_us: Some(mean_us),
                stages_us: stages.map(|&(name, us)| (name.into(), us)).collect(),
                ..Figures::default()
            },
            operations: Vec::new(),
            refused: 0,
            in_flight: 1,
            mean_in_flight: mean_us / 1e3,
            cpu_percent: None,
            pool_cpu_percent: None,
            polling_percent: 0.0,
            workers: vec![WorkerSample::default()],
            queues: Vec::new(),
            limiter: idle(),
            histogram: Vec::new(),
        }
    }

    #[track_caller]
    fn is(disk: &DiskSample, kind: LimiterKind, text: &str) {
        let found = limiter(disk);
        assert_eq!((found.kind, &*found.text), (kind, text));
    }

    #[test]
    fn states_without_completed_requests_are_told_apart() {
        let mut none = disk(0.0, &[]);
        (none.all.requests, none.all.mean_us) = (0, None);
        is(
            &none,
            LimiterKind::Stuck,
            "stuck: 1 in flight, none answered",
        );
        none.filters = vec!["readonly".into(), "pause".into()];
        let text = "stuck: 1 in flight, none answered; filter pause";
        is(&none, LimiterKind::Stuck, text);
        none.in_flight = 0;
        is(&none, LimiterKind::Idle, "idle");
        none.frozen = true;
        let text = "frozen: requests wait until 'fathom disk thaw'";
        is(&none, LimiterKind::Frozen, text);
    }

    /// The views, the reports and the documentation have the same words.
    #[test]
    fn kinds_and_texts_have_names_from_the_list() {
        use LimiterKind::{Client, Filter, Frozen, Idle, Latency, Stuck, Tables, Thread, Unknown};
        let kinds = [
            Idle, Frozen, Stuck, Filter, Thread, Tables, Client, Latency, Unknown,
        ];
        for kind in kinds {
            let name = serde_json::to_value(kind).unwrap();
            let name = name.as_str().unwrap();
            assert!(fathom_limiter::words_for(name).is_some(), "{name}");
        }
        let mut none = disk(0.0, &[]);
        (none.all.requests, none.all.mean_us) = (0, None);
        let begins = |disk: &DiskSample, name| limiter(disk).text.starts_with(name);
        assert!(begins(&none, "stuck"));
        none.in_flight = 0;
        assert!(begins(&none, "idle"));
        none.frozen = true;
        assert!(begins(&none, "frozen"));
    }

    #[test]
    fn a_client_that_waits_is_told_from_one_that_does_not() {
        let stages = [("queue", 10.0), ("device", 190.0)];
        is(
            &disk(200.0, &stages),
            LimiterKind::Client,
            "client: keeps 0.2 requests in flight",
        );
        let stages = [("queue", 50.0), ("device", 900.0)];
        is(
            &disk(950.0, &stages),
            LimiterKind::Latency,
            "latency: 0.9 in flight / 950 us, no busy thread seen; largest layer host: device (95%)",
        );
        let mut remote = disk(32_000.0, &[("device", 31_000.0)]);
        remote.image = "nbd://server/disk".into();
        is(
            &remote,
            LimiterKind::Latency,
            "latency: 32 in flight / 32.0 ms, no busy thread seen; largest layer NBD server (97%)",
        );
    }

    #[test]
    fn lookups_in_tables_are_named() {
        let stages = [("map", 700.0), ("device", 200.0)];
        let text = "tables of the image: 78% of the request's time (--metadata-cache)";
        is(&disk(900.0, &stages), LimiterKind::Tables, text);
    }

    #[test]
    fn a_thread_that_only_polls_is_not_busy() {
        let mut busy = disk(8000.0, &[("device", 7000.0)]);
        busy.workers[0].cpu_percent = Some(98.0);
        let text = "thread: I/O thread 'worker 0' on CPU 98%";
        is(&busy, LimiterKind::Thread, text);
        busy.workers[0].polling_percent = 60.0;
        assert_eq!(limiter(&busy).kind, LimiterKind::Latency);
        busy.workers[0].cpu_percent = None;
        (busy.pool, busy.pool_cpu_percent) = (Some("fast".into()), Some(99.0));
        let text = "thread: I/O thread 'pool fast' on CPU 99%";
        is(&busy, LimiterKind::Thread, text);
    }

    #[test]
    fn the_filter_that_may_hold_back_is_named() {
        let held = |filters: &[&str]| {
            let mut held = disk(1000.0, &[("queue", 970.0), ("device", 20.0)]);
            held.filters = filters.iter().map(|one| (*one).to_owned()).collect();
            limiter(&held).text
        };
        assert_eq!(
            held(&["readonly", "delay:read=30ms"]),
            "delay:read=30ms filter: 97% of the request's time"
        );
        let two = held(&["delay", "throttle:iops=5"]);
        assert!(two.starts_with("delay and throttle:iops=5 filter"), "{two}");
        assert!(held(&["cow"]).starts_with("cow filter"));
        // Without filters, requests queue in front of the image.
        assert!(held(&[]).ends_with("largest layer fathom: queue (97%)"));
    }
}
