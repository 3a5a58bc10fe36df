//! CPUs whose hypervisor ran something else, as reported by the machine itself.

use fathom_run::evidence::{Evidence, Processors};

use crate::figures::{DELAYED, GAIN, SATURATED, percent, share};
use crate::rule::Finding;
use crate::slices::{Side, Waiting};

/// Finds a guest's CPU that had work all the time and was not run for a part of it.
///
/// ```text
/// busy + steal          >= 0.95     [share of the window]
/// (busy + steal) / busy >= 1.15     [gain without steal]
/// ```
///
/// Holds if no larger part of a request's time was seen elsewhere. Steal of the host is not used:
/// the host's threads are measured one by one, and `working` corrects for it.
pub fn starved(evidence: &Evidence) -> Option<Finding> {
    let wants_all =
        |busy: f64, steal: f64| busy + steal >= SATURATED && busy + steal >= GAIN * busy;
    let worst = worst(evidence.guest.as_ref()?, wants_all)?;
    let waiting = Waiting::of(evidence, Side::Guest, &[worst.steal]);
    let is_largest = waiting.is_none_or(|waiting| waiting.is_largest);
    (worst.steal >= DELAYED).then(|| worst.finding("guest", None, is_largest))
}

/// Finds any CPU with noticeable steal, including those of the host: in 5% of a request's time, or
/// of the window if the requests are not known.
///
/// Holds if it is the largest part of a request's time (see `Waiting`).
pub fn delayed(evidence: &Evidence) -> Option<Finding> {
    let starved = starved(evidence);
    if starved.as_ref().is_some_and(|finding| finding.holds()) {
        return None; // reported by `starved`
    }
    let guest = evidence.guest.as_ref().filter(|_| starved.is_none());
    let machines = [
        (guest, "guest", Side::Guest),
        (evidence.host.as_ref(), "host", Side::Both),
    ];
    let found = machines.into_iter().filter_map(|(machine, name, side)| {
        let worst = worst(machine?, |_, _| true)?;
        let waiting = Waiting::of(evidence, side, &[worst.steal]);
        let holds = waiting.is_some_and(|waiting| waiting.is_largest && waiting.explains);
        let most = waiting.map(|waiting| waiting.most);
        let part = most.unwrap_or(worst.steal);
        (part >= DELAYED).then(|| (part, worst.finding(name, most, holds)))
    });
    // A machine whose steal explains the requests is preferred to one with more of it.
    let strongest = found.max_by(|one, other| {
        let by_holding = one.1.holds().cmp(&other.1.holds());
        by_holding.then(one.0.total_cmp(&other.0))
    });
    strongest.map(|(_, finding)| finding)
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
    /// `most` is the share of a request's time, if it is stated.
    fn finding(&self, machine: &str, most: Option<f64>, holds: bool) -> Finding {
        let most = most.map_or_else(String::new, |most| {
            format!(", at most {} of the request's time", percent(most))
        });
        let text = format!(
            "steal: CPU {} of the {machine} was ready and not run in {} of the window, and ran in \
             {}{most}",
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

    /// As above, and the load is in memory.
    fn in_memory(busy: f64, steal: f64) -> Evidence {
        with(guest(busy, steal), |evidence| evidence.device = None)
    }

    #[test]
    fn a_busy_cpu_of_which_much_is_stolen_is_starved() {
        let finding = starved(&in_memory(61.0, 38.0)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "steal: CPU 1 of the guest was ready and not run in 38% of the window, and ran in 61%"
        );
        assert_eq!(finding.subject.as_deref(), Some("guest CPU 1"));
        assert!(starved(&in_memory(83.0, 13.0)).unwrap().holds());
        assert!(starved(&in_memory(90.0, 5.1)).is_none(), "no gain");
        assert!(starved(&in_memory(56.0, 38.0)).is_none());
        // The requests are in the device.
        assert!(!starved(&guest(61.0, 38.0)).unwrap().holds());
    }

    /// A cell with one request of 400 us at a time, of which the device takes `device_us`.
    fn one_by_one(steal: f64, device_us: f64) -> Evidence {
        with(cell(1, 400.0), |evidence| {
            evidence.device.as_mut().unwrap().mean_ns = device_us * 1e3;
            evidence.guest.as_mut().unwrap().steal[0] = steal;
            evidence.threads.clear();
        })
    }

    #[test]
    fn steal_is_a_part_of_the_requests_time() {
        let finding = delayed(&one_by_one(50.0, 100.0)).unwrap();
        assert!(finding.holds());
        assert!(
            finding.text.ends_with("at most 51% of the request's time"),
            "{}",
            finding.text
        );
        assert!(
            !delayed(&one_by_one(30.0, 200.0)).unwrap().holds(),
            "device"
        );
        assert!(!delayed(&one_by_one(30.0, 4.0)).unwrap().holds(), "unseen");
        assert!(delayed(&one_by_one(4.9, 4.0)).is_none());
    }

    #[test]
    fn steal_of_the_host_is_found() {
        let host = with(one_by_one(0.0, 4.0), |evidence| {
            evidence.host.as_mut().unwrap().steal[1] = 62.0;
        });
        let finding = delayed(&host).unwrap();
        assert!(finding.holds() && finding.text.contains("of the host"));
        assert!(starved(&host).is_none());
    }
}
