//! Pressure of the host (PSI).
//!
//! I/O pressure is not used: a task that reads a disk without pause raises it to 100 %, although it
//! waits only for its own requests.

use fathom_run::evidence::Evidence;

use crate::figures::{on_path, percent, share};
use crate::rule::Finding;

/// Minimum share of the window in which some task waited. Any task of the machine counts, so this
/// is twice the share for a thread on the path.
const HIGH: f64 = 0.10;

/// Holds if some task waited for memory, or for a CPU if the waits of the path's own threads are
/// not known:
///
/// ```text
/// time in which some task waited / window >= 0.10   [s / s]
/// ```
///
/// Memory that is short is a cause and not a part of a request's time: data that has left the page
/// cache is read from the device again.
pub fn high(evidence: &Evidence) -> Option<Finding> {
    let pressure = evidence.pressure?;
    let finding = |what: &str, share: f64| {
        let text = format!(
            "pressure: some task waited for {what} in {} of the window",
            percent(share)
        );
        (share >= HIGH).then(|| Finding::verdict(text).about(what))
    };
    // If the waits of the path's own threads are known, those of other tasks do not matter.
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
