//! Measures how much of an instance the host sees, and how much of itself the instance sees.

use std::fs;
use std::time::Duration;

use fathom_run::{Better, Measure, Unit};

use crate::bed::instance::{Instance, Kind};
use crate::error::{Error, Result};
use crate::process_tree;

const SHORT: Duration = Duration::from_secs(60);
const EVENTS: &str = "/sys/kernel/tracing/available_events";
/// Number of processes that are started in the instance and searched on the host.
const PROCESSES: usize = 5;

/// Returns all measures that are available.
///
/// # Errors
/// If a script fails in the instance.
pub fn measures(kind: Kind, instance: &mut Instance) -> Result<Vec<Measure>> {
    let count = |name: &str, value: f64| Measure::new(name, Unit::Count, value, Better::Neither);
    let mut measures = vec![count("events.own", own_events(kind, instance)?)];
    // Not readable without root privileges, or if tracefs is not mounted.
    if let Ok(text) = fs::read_to_string(EVENTS) {
        measures.push(count("events.host", host_events(kind, &text)));
    }
    let seen = processes_seen(instance)? * 100.0;
    let seen = Measure::new("processes.seen", Unit::Percent, seen, Better::Neither);
    measures.push(seen);
    Ok(measures)
}

/// Returns the number of this machine's tracing events that show what happens in the instance.
fn host_events(kind: Kind, all: &str) -> f64 {
    let is_told = |event: &&str| match kind {
        Kind::Bare | Kind::Container => true,
        Kind::Kvm => event.starts_with("kvm:") || event.starts_with("kvmmmu:"),
        Kind::Tcg | Kind::Uml | Kind::Libguestfs => false,
    };
    all.lines().filter(is_told).count() as f64
}

/// Returns the number of events in the instance's tracefs. An instance with a kernel of its own
/// mounts tracefs; others see what exists.
fn own_events(kind: Kind, instance: &mut Instance) -> Result<f64> {
    let mount = match kind {
        Kind::Bare | Kind::Container => "true",
        Kind::Kvm | Kind::Tcg | Kind::Uml | Kind::Libguestfs => {
            "mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null || true"
        }
    };
    let script = format!("{mount}\ncat {EVENTS} 2>/dev/null | wc -l");
    number(&instance.check(&script, SHORT)?)
}

/// Starts processes in the instance. Returns the share that the host finds by name.
fn processes_seen(instance: &mut Instance) -> Result<f64> {
    let before = process_tree::named(instance.pid(), "sleep").len();
    let script =
        format!("for i in $(seq {PROCESSES}); do (sleep 10 >/dev/null 2>&1 &); done; sleep 0.5");
    instance.check(&script, SHORT)?;
    let now = process_tree::named(instance.pid(), "sleep").len();
    let seen = now.saturating_sub(before).min(PROCESSES);
    Ok(seen as f64 / PROCESSES as f64)
}

/// Returns the bytes of the given memory that the instance's kernel keeps.
///
/// # Errors
/// If the script fails in the instance.
pub fn kept_by_kernel(instance: &mut Instance, given: u64) -> Result<f64> {
    let script = "sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    let kib = number(&instance.check(script, SHORT)?)?;
    Ok(given as f64 - kib * 1024.0)
}

fn number(text: &str) -> Result<f64> {
    let number = text.trim().parse();
    number.map_err(|_| Error::Protocol(format!("'{text}' is no number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_guest_only_its_hypervisor_tells() {
        let all = "sched:sched_switch\nkvm:kvm_exit\nkvmmmu:kvm_mmu_get_page\n";
        let counts = [Kind::Container, Kind::Kvm, Kind::Tcg].map(|kind| host_events(kind, all));
        assert_eq!(counts, [3.0, 2.0, 0.0]);
    }
}
