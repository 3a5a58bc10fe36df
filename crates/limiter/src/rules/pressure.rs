//! Pressure (PSI) of the host.
//!
//! Not that of I/O: whoever reads a disk without a pause makes it 100 %, and waits for nothing but
//! what was asked for.

use fathom_run::evidence::Evidence;

use crate::figures::{on_path, percent, share};
use crate::rule::Finding;

/// Of the window in which some task waited. Any task of the machine counts, so that this is twice
/// of what a thread of the path may wait.
const HIGH: f64 = 0.10;

pub fn high(evidence: &Evidence) -> Option<Finding> {
    let pressure = evidence.pressure?;
    let finding = |what: &str, share: f64| {
        let text = format!(
            "pressure: some task waited for {what} in {} of the window",
            percent(share)
        );
        (share >= HIGH).then(|| Finding::holds(text).about(what))
    };
    // Where the threads' own waits for a CPU are known, others' do not matter.
    let mut path = evidence.threads.iter().filter(|one| on_path(one.role));
    let is_known = path.any(|one| one.waiting.is_some());
    let memory = share(pressure.memory, 100.0).and_then(|share| finding("memory", share));
    memory.or_else(|| {
        let cpu = share(pressure.cpu, 100.0).filter(|_| !is_known)?;
        finding("a CPU", cpu)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Pressure;

    fn pressed(cpu: f64, io: f64, memory: f64) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            evidence.pressure = Some(Pressure { cpu, io, memory });
        })
    }

    #[test]
    fn memory_that_is_short_is_said() {
        let finding = high(&pressed(0.0, 0.0, 10.1)).unwrap();
        assert_eq!(
            finding.text,
            "pressure: some task waited for memory in 10% of the window"
        );
        assert!(high(&pressed(0.0, 0.0, 9.9)).is_none());
        assert!(high(&pressed(0.0, 100.0, 0.0)).is_none());
    }

    #[test]
    fn a_cpus_pressure_counts_where_threads_do_not_tell() {
        assert!(high(&pressed(60.0, 0.0, 0.0)).is_none());
        let blind = with(pressed(60.0, 0.0, 0.0), |evidence| evidence.threads.clear());
        assert_eq!(high(&blind).unwrap().subject.as_deref(), Some("a CPU"));
    }
}
