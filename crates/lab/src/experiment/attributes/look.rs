//! What can be seen: by the host of an instance, and by it of itself.

use std::fs;
use std::time::Duration;

use fathom_run::{Better, Measure, Unit};

use crate::bed::instance::{Instance, Kind};
use crate::error::{Error, Result};
use crate::process_tree;

const SHORT: Duration = Duration::from_secs(60);
const EVENTS: &str = "/sys/kernel/tracing/available_events";
/// Processes that are looked for.
const PROCESSES: usize = 5;

/// All of it, as far as it can be told.
///
/// # Errors
/// When a script fails in the instance.
pub fn measures(kind: Kind, instance: &mut Instance) -> Result<Vec<Measure>> {
    let count = |name: &str, value: f64| Measure::new(name, Unit::Count, value, Better::Neither);
    let mut measures = vec![count("events.own", own_events(kind, instance)?)];
    // None without root's rights, or where nobody has mounted it.
    if let Ok(text) = fs::read_to_string(EVENTS) {
        measures.push(count("events.host", host_events(kind, &text)));
    }
    let seen = processes_seen(instance)? * 100.0;
    let seen = Measure::new("processes.seen", Unit::Percent, seen, Better::Neither);
    measures.push(seen);
    Ok(measures)
}

/// Of this machine's events, those that tell of what happens in it.
fn host_events(kind: Kind, all: &str) -> f64 {
    let is_told = |event: &&str| match kind {
        Kind::Bare | Kind::Container => true,
        Kind::Kvm => event.starts_with("kvm:") || event.starts_with("kvmmmu:"),
        Kind::Tcg | Kind::Uml | Kind::Libguestfs => false,
    };
    all.lines().filter(is_told).count() as f64
}

/// What is in its tracefs. A kernel of its own has one to mount; others see what is there.
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

/// The part of some processes in it that the host sees by their name.
fn processes_seen(instance: &mut Instance) -> Result<f64> {
    let before = process_tree::named(instance.pid(), "sleep").len();
    let script =
        format!("for i in $(seq {PROCESSES}); do (sleep 10 >/dev/null 2>&1 &); done; sleep 0.5");
    instance.check(&script, SHORT)?;
    let now = process_tree::named(instance.pid(), "sleep").len();
    let seen = now.saturating_sub(before).min(PROCESSES);
    Ok(seen as f64 / PROCESSES as f64)
}

/// Bytes that a kernel of its own keeps of what it was given.
///
/// # Errors
/// When the script fails in the instance.
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
