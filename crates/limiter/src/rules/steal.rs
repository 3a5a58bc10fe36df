//! CPUs whose hypervisor ran something else, as reported by the machine itself.

use fathom_run::evidence::{Evidence, Processors};

use crate::figures::{DELAYED, SATURATED, percent, share};
use crate::rule::Finding;

/// Holds if a guest's CPU had work all the time and was not run for a part of it.
///
/// Steal of the host is not used: the host's threads are measured one by one, and `working`
/// corrects for it.
pub fn starved(evidence: &Evidence) -> Option<Finding> {
    let wants_all = |busy: f64, steal: f64| busy + steal >= SATURATED;
    let worst = worst(evidence.guest.as_ref()?, wants_all)?;
    (worst.steal >= DELAYED).then(|| worst.finding("guest", true))
}

/// Finds any CPU with noticeable steal, including those of the host.
pub fn delayed(evidence: &Evidence) -> Option<Finding> {
    if starved(evidence).is_some() {
        return None; // reported by `starved`
    }
    let of = |machine: &Option<Processors>| worst(machine.as_ref()?, |_, _| true);
    let guest = of(&evidence.guest).map(|worst| (worst, "guest"));
    let host = of(&evidence.host).map(|worst| (worst, "host"));
    let both = guest.into_iter().chain(host);
    let (worst, machine) = both.max_by(|one, other| one.0.steal.total_cmp(&other.0.steal))?;
    let device = crate::device_part::device_share(evidence);
    let is_more = device.is_none_or(|device| device < worst.steal);
    (worst.steal >= DELAYED).then(|| worst.finding(machine, is_more))
}

struct Worst {
    cpu: usize,
    steal: f64,
    busy: f64,
}

/// Returns the CPU with the most steal for which `fits(busy, steal)` is true.
fn worst(machine: &Processors, fits: impl Fn(f64, f64) -> bool) -> Option<Worst> {
    let pairs = machine.steal.iter().enumerate();
    let all = pairs.filter_map(|(cpu, &steal)| {
        let steal = share(steal, 100.0)?;
        let busy = machine.busy.get(cpu).and_then(|&busy| share(busy, 100.0));
        let busy = busy.unwrap_or(0.0);
        fits(busy, steal).then_some(Worst { cpu, steal, busy })
    });
    all.max_by(|one, other| one.steal.total_cmp(&other.steal))
}

impl Worst {
    fn finding(&self, machine: &str, holds: bool) -> Finding {
        let text = format!(
            "steal: CPU {} of the {machine} was ready and not run in {} of the window, and ran in {}",
            self.cpu,
            percent(self.steal),
            percent(self.busy)
        );
        let finding = match holds {
            true => Finding::verdict(text),
            false => Finding::weak(text),
        };
        finding.about(format!("{machine} CPU {}", self.cpu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};

    fn guest(busy: f64, steal: f64) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            evidence.guest = Some(Processors {
                busy: vec![3.0, busy],
                steal: vec![0.0, steal],
            });
        })
    }

    #[test]
    fn a_busy_cpu_of_which_much_is_stolen_is_starved() {
        let finding = starved(&guest(61.0, 38.0)).unwrap();
        assert_eq!(
            finding.text,
            "steal: CPU 1 of the guest was ready and not run in 38% of the window, and ran in 61%"
        );
        assert_eq!(finding.subject.as_deref(), Some("guest CPU 1"));
        assert!(starved(&guest(90.0, 5.1)).is_some());
        assert!(starved(&guest(96.0, 4.9)).is_none());
        assert!(starved(&guest(56.0, 38.0)).is_none());
    }

    #[test]
    fn steal_of_an_idle_cpu_counts_against_what_the_device_takes() {
        assert!(!delayed(&guest(20.0, 5.1)).unwrap().holds());
        let fast = with(guest(20.0, 5.1), |evidence| evidence.device = None);
        assert!(delayed(&fast).unwrap().holds());
        assert!(delayed(&guest(20.0, 4.9)).is_none());
        let host = with(guest(20.0, 0.0), |evidence| {
            evidence.device = None;
            evidence.host = evidence.guest.clone();
            evidence.host.as_mut().unwrap().steal[1] = 12.0;
        });
        let finding = delayed(&host).unwrap();
        assert!(finding.holds() && finding.text.contains("of the host"));
        assert!(starved(&host).is_none());
    }
}
