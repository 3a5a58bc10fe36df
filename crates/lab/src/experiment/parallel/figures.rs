//! Measures of appliances that were up at the same time.

use std::time::Duration;

use fathom_run::evidence::Load;
use fathom_run::{Better, Measure, Unit};

use super::RATE;
use super::together::Outcome;
use crate::experiment::memory::Memory;

/// Memory while all appliances are up.
pub struct Sizes {
    pub qemus: Memory,
    pub servers: Memory,
    /// Memory of the QEMUs after equal pages have been merged.
    pub merged: Option<Memory>,
}

impl Outcome {
    /// Seconds from the first start to the last end, without the work done while all were up.
    pub fn closed(&self) -> f64 {
        (self.all_up() + self.closing).as_secs_f64()
    }

    fn mean_up(&self) -> f64 {
        let sum: Duration = self.up.iter().sum();
        sum.as_secs_f64() / self.up.len().max(1) as f64
    }

    /// Returns the load. A request is the start of an appliance.
    pub fn load(&self) -> Load {
        Load {
            threads: u32::try_from(self.up.len()).unwrap_or(u32::MAX),
            depth: 1,
            requests: self.up.len() as u64,
            mean_ns: self.mean_up() * 1e9,
            ..Load::default()
        }
    }
}

impl Sizes {
    pub fn sum(&self) -> u64 {
        self.qemus.proportional + self.servers.proportional
    }
}

/// Returns the measures of time.
pub fn times(outcome: &Outcome, count: usize, alone: f64) -> Vec<Measure> {
    let closed = outcome.closed();
    let efficiency = efficiency(alone, closed, count, cpus());
    let seconds = |name, value, better| Measure::new(name, Unit::Seconds, value, better);
    let each = closed / count as f64;
    vec![
        Measure::new(RATE, Unit::PerSecond, 1.0 / each, Better::Higher),
        Measure::new("efficiency", Unit::Ratio, efficiency, Better::Higher),
        seconds("up", outcome.all_up().as_secs_f64(), Better::Lower),
        seconds("closed", closed, Better::Lower),
        seconds("per-appliance", each, Better::Lower),
        seconds("up.mean", outcome.mean_up(), Better::Lower).of(count as u64),
        seconds("alone", alone, Better::Neither),
    ]
}

/// Returns the time of one appliance alone, multiplied by the number of appliances per usable CPU,
/// relative to the time of all together.
fn efficiency(alone: f64, together: f64, count: usize, cpus: usize) -> f64 {
    alone * count as f64 / (together * count.min(cpus) as f64)
}

/// Returns the measures of memory, per appliance.
pub fn memory(sizes: &Sizes, count: usize) -> Vec<Measure> {
    let each = |name, bytes: u64, better| {
        Measure::new(name, Unit::Bytes, bytes as f64 / count as f64, better)
    };
    let mut measures = vec![
        each("memory.each", sizes.sum(), Better::Lower),
        each("memory.qemu", sizes.qemus.proportional, Better::Lower),
        each("memory.shared", sizes.qemus.shared, Better::Neither),
    ];
    if sizes.servers.proportional > 0 {
        let servers = each("memory.servers", sizes.servers.proportional, Better::Lower);
        measures.push(servers);
    }
    if let Some(merged) = sizes.merged {
        let bytes = merged.proportional + sizes.servers.proportional;
        measures.push(each("memory.merged.each", bytes, Better::Lower));
    }
    measures
}

/// Returns the number of CPUs that this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_is_one_with_a_cpu_each_or_fair_sharing() {
        // A single appliance takes 3 s. On two CPUs, two take 3 s, and eight take 12 s.
        assert_eq!(efficiency(3.0, 3.0, 1, 2), 1.0);
        assert_eq!(efficiency(3.0, 3.0, 2, 2), 1.0);
        assert_eq!(efficiency(3.0, 12.0, 8, 2), 1.0);
        assert_eq!(efficiency(3.0, 24.0, 8, 2), 0.5);
        // With enough CPUs, running one after the other is inefficient.
        assert_eq!(efficiency(3.0, 12.0, 4, 16), 0.25);
    }

    #[test]
    fn what_is_done_while_all_are_up_does_not_count() {
        let outcome = Outcome {
            up: [4, 2].map(Duration::from_secs).to_vec(),
            closing: Duration::from_secs(1),
            failures: Vec::new(),
        };
        let measures = times(&outcome, 2, 3.0);
        let value = |name: &str| {
            let found = measures.iter().find(|one| one.name == name);
            found.unwrap().value
        };
        assert_eq!((value("up"), value("closed")), (4.0, 5.0));
        assert_eq!((value("per-appliance"), value(RATE)), (2.5, 0.4));
        assert_eq!(value("up.mean"), 3.0);
        let load = outcome.load();
        assert_eq!((load.threads, load.requests, load.mean_ns), (2, 2, 3e9));
    }

    #[test]
    fn memory_is_told_by_appliances() {
        let of = |proportional, shared| Memory {
            proportional,
            shared,
        };
        let sizes = Sizes {
            qemus: of(400, 60),
            servers: of(20, 8),
            merged: Some(of(200, 300)),
        };
        let told: Vec<(String, f64)> = memory(&sizes, 2)
            .into_iter()
            .map(|one| (one.name, one.value))
            .collect();
        let wanted = [
            ("memory.each", 210.0),
            ("memory.qemu", 200.0),
            ("memory.shared", 30.0),
            ("memory.servers", 10.0),
            ("memory.merged.each", 110.0),
        ];
        assert_eq!(told, wanted.map(|(name, value)| (name.to_owned(), value)));
    }
}
