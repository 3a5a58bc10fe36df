//! Fathom's own times within a window: the difference between two readings of its statistics.

use fathom_limiter::layers;
use fathom_run::evidence::{Held, Layer};
use fathom_run::{Better, Measure, Unit};
use serde_json::Value;

const TOTAL: &str = "total";

/// Number and times of requests by operation and stage, in the server's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stages(Vec<Stage>);

#[derive(Clone, Debug, PartialEq)]
struct Stage {
    op: String,
    name: String,
    times: Times,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    count: u64,
    ns: f64,
}

impl Times {
    fn mean(self) -> Option<f64> {
        (self.count > 0).then(|| self.ns / self.count as f64)
    }
}

impl Stages {
    /// Parses a server's statistics.
    pub fn of(stats: &Value) -> Stages {
        let mut all = Vec::new();
        let operations = stats["operations"].as_array().into_iter().flatten();
        for operation in operations {
            let stages = operation["stages"].as_array().into_iter().flatten();
            all.extend(stages.filter_map(|stage| {
                let count = stage["count"].as_u64()?;
                let ns = stage["mean_ns"].as_f64()? * count as f64;
                Some(Stage {
                    op: operation["op"].as_str()?.to_owned(),
                    name: stage["stage"].as_str()?.to_owned(),
                    times: Times { count, ns },
                })
            }));
        }
        Stages(all)
    }

    /// Returns the difference to an earlier reading.
    pub fn since(&self, earlier: &Stages) -> Stages {
        let added = |now: &Stage| {
            let mut seen = earlier.0.iter();
            let before = seen.find(|one| one.op == now.op && one.name == now.name);
            let before = before.map(|one| one.times).unwrap_or_default();
            let count = now.times.count.checked_sub(before.count)?;
            let ns = (now.times.ns - before.ns).max(0.0);
            (count > 0).then(|| Stage {
                times: Times { count, ns },
                ..now.clone()
            })
        };
        Stages(self.0.iter().filter_map(added).collect())
    }

    /// Returns the sum over all operations of a stage.
    fn all(&self, stage: &str) -> Times {
        let these = self.0.iter().filter(|one| one.name == stage);
        these.fold(Times::default(), |sum, one| Times {
            count: sum.count + one.times.count,
            ns: sum.ns + one.times.ns,
        })
    }

    /// Returns the number of requests that were served.
    pub fn requests(&self) -> u64 {
        self.all(TOTAL).count
    }

    /// Returns the mean times by stage. With several operations, they are also by operation.
    pub fn measures(&self) -> Vec<Measure> {
        let is_one = { self.0.windows(2) }.all(|pair| pair[0].op == pair[1].op);
        let measure = |stage: &Stage| {
            let mean = stage.times.mean()?;
            let name = match is_one {
                true => format!("fathom.{}.mean", stage.name),
                false => format!("fathom.{}.{}.mean", stage.op, stage.name),
            };
            let measure = Measure::new(name, Unit::Nanoseconds, mean, Better::Lower);
            Some(measure.of(stage.times.count))
        };
        self.0.iter().filter_map(measure).collect()
    }

    /// Splits the mean time of a request, which is `mean_ns` in the guest, into these stages and
    /// the time outside of the server.
    pub fn layers(&self, mean_ns: f64) -> Vec<Layer> {
        let Some(total) = self.all(TOTAL).mean() else {
            return Vec::new();
        };
        let layer = |name: &str, mean_ns: f64| Layer {
            name: name.to_owned(),
            mean_ns,
        };
        let mut all = vec![layer(layers::OUTSIDE, (mean_ns - total).max(0.0))];
        let told = layers::STAGES
            .iter()
            .filter_map(|name| Some((name, self.all(name).mean()?)));
        all.extend(told.map(|(name, mean)| layer(&layers::of_stage(name), mean)));
        all
    }

    /// Returns the time that filters have delayed requests, which is the stage `queue`. With
    /// several filters, only their sum is known.
    pub fn held(&self, filters: &[String]) -> Option<Held> {
        let queue = self.all("queue");
        let mean_ns = queue.mean()?;
        (!filters.is_empty()).then(|| Held {
            filter: filters.join(" and "),
            requests: queue.count,
            mean_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stats(reads: u64, wake: f64, writes: u64) -> Value {
        let stage =
            |name, count, mean: f64| json!({"stage": name, "count": count, "mean_ns": mean});
        json!({"operations": [
            {"op": "write", "stages": [stage("device", writes, 9.0), stage("total", writes, 9.0)]},
            {"op": "read", "stages": [stage("wake", reads, wake), stage("total", reads, 8.0)]},
        ]})
    }

    #[test]
    fn a_window_has_only_what_was_added_in_it() {
        let before = Stages::of(&stats(10, 100.0, 5));
        let window = Stages::of(&stats(30, 50.0, 5)).since(&before);
        let said: Vec<_> = { window.measures().into_iter() }
            .map(|m| (m.name, m.value, m.samples))
            .collect();
        // The sum of 30 reads at 50 ns minus 10 at 100 ns. The window has no writes.
        let wanted = [
            ("fathom.wake.mean".to_owned(), 25.0, 20),
            ("fathom.total.mean".to_owned(), 8.0, 20),
        ];
        assert_eq!(said, wanted);
        assert_eq!(window.requests(), 20);
        assert_eq!(before.since(&before), Stages::default());
    }

    #[test]
    fn several_operations_are_told_apart_and_layers_are_of_all() {
        let all = Stages::of(&stats(10, 4.0, 30));
        let names: Vec<_> = all.measures().into_iter().map(|m| m.name).collect();
        assert!(
            names.contains(&"fathom.read.wake.mean".to_owned()),
            "{names:?}"
        );
        assert!(
            names.contains(&"fathom.write.total.mean".to_owned()),
            "{names:?}"
        );
        let layers = all.layers(20.0);
        // The reads are 10 requests of 8 ns, and the writes are 30 requests of 9 ns.
        assert_eq!(layers[0].mean_ns, 20.0 - 8.75);
        assert_eq!(layers.last().unwrap().name, "host: device");
    }

    #[test]
    fn only_filters_hold_back() {
        let stage = json!({"stage": "queue", "count": 4, "mean_ns": 50.0});
        let all = Stages::of(&json!({"operations": [{"op": "read", "stages": [stage]}]}));
        assert_eq!(all.held(&[]), None);
        let held = all.held(&["delay".into(), "throttle".into()]).unwrap();
        assert_eq!(
            (held.filter.as_str(), held.requests),
            ("delay and throttle", 4)
        );
    }

    #[test]
    fn garbage_has_no_figures() {
        for strange in [
            json!(null),
            json!({"operations": 3}),
            json!({"operations": [[], {"op": 1}]}),
        ] {
            assert_eq!(Stages::of(&strange), Stages::default());
        }
    }
}
