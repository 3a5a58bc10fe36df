//! The facts of a run, shared by all renderers: machines, workload, and how reliable the join is.

use fathom_run::{Disk, Environment, Machine, Role, Scenario, Thread};

use super::names;
use super::text::{plural, size};
use crate::analysis::{Analysis, Truth};

/// How a renderer writes a count.
pub(super) type Count = fn(u64) -> String;

/// Joins texts with commas; empty ones are left out, and no texts give `unknown`.
pub(super) fn listed(parts: impl IntoIterator<Item = String>) -> String {
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    let parts: Vec<String> = parts.collect();
    match parts.is_empty() {
        true => "unknown".to_owned(),
        false => parts.join(", "),
    }
}

/// Returns `word` with `before` in front of it; empty if `word` is empty.
fn after(before: &str, word: &str) -> String {
    match word.is_empty() {
        true => String::new(),
        false => format!("{before}{word}"),
    }
}

/// Describes a kernel and its machine.
fn machine(machine: &Machine) -> String {
    let cpus = match machine.cpus {
        0 => String::new(),
        count => plural(count.into(), "CPU"),
    };
    listed([
        after("Linux ", &machine.kernel),
        machine.cpu.clone(),
        cpus,
        after("clock source ", &machine.clock_source),
        after("traced by ", &machine.trace_clock),
    ])
}

fn workload(scenario: &Scenario) -> String {
    let known = |number: u64, text: String| match number {
        0 => String::new(),
        _ => text,
    };
    let (depth, queues) = (scenario.iodepth.into(), scenario.queues.into());
    listed([
        scenario.rw.clone(),
        known(
            scenario.block_size,
            format!("{} blocks", size(scenario.block_size)),
        ),
        known(depth, format!("depth {depth}")),
        known(queues, plural(queues, "queue")),
    ])
}

fn server(scenario: &Scenario) -> String {
    let polls = match scenario.polling {
        true => "polls",
        false => "does not poll",
    };
    listed([
        scenario.server.clone(),
        after("aio=", &scenario.aio),
        after("cache=", &scenario.cache),
        polls.to_owned(),
    ])
}

fn disk(disk: &Disk) -> String {
    let guest = disk.guest_name.as_ref();
    let image = disk.image.as_ref();
    let host = disk.host.as_ref().map(|host| {
        let scheduler = match host.scheduler.as_str() {
            "" => String::new(),
            name => format!(" (scheduler {name})"),
        };
        format!("on {}{scheduler}", host.name)
    });
    let identified = disk.identified_by.as_ref().map_or(
        "unidentified: its kicks and interrupts cannot be distinguished from those of other devices"
            .to_owned(),
        |how| format!("identified by {how}"),
    );
    listed([
        disk.name.clone(),
        disk.device.clone(),
        guest.map_or(String::new(), |name| format!("{name} in the guest")),
        image.map_or(String::new(), |image| image.display().to_string()),
        host.unwrap_or_default(),
        identified,
    ])
}

/// The warning about stretched times.
pub(crate) const STRETCHED: &str = "Times are stretched: the host is itself emulated. The figures \
                                    verify the method and say nothing about speed.";

const EMULATED: &str = "Guests, if any, were emulated (TCG): their figures compare only with those \
                        of other emulated guests.";

/// Returns the warning for all figures from such machines, if any.
pub(crate) fn doubt(environment: &Environment) -> Option<&'static str> {
    match environment.accelerator.eq_ignore_ascii_case("tcg") {
        _ if environment.stretched => Some(STRETCHED),
        true => Some(EMULATED),
        false => None,
    }
}

/// Returns the machines and programs of a run, each as a name and a text.
pub(crate) fn machines(environment: &Environment) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    if let Some(remote) = &environment.remote {
        rows.push(("remote host", machine(remote)));
    }
    if let Some(guest) = &environment.guest {
        rows.push(("guest", machine(guest)));
    }
    rows.push(("host", machine(&environment.host)));
    let programs = [
        ("accelerator", environment.accelerator.clone()),
        ("QEMU", environment.qemu.clone().unwrap_or_default()),
        ("Fathom", environment.fathom.clone()),
    ];
    rows.extend(programs.into_iter().filter(|(_, text)| !text.is_empty()));
    rows
}

/// Returns the machines and programs of a run, its workload and its disks.
pub(super) fn environment(run: &Analysis) -> Vec<(&'static str, String)> {
    let mut rows = machines(&run.environment);
    if let Some(scenario) = &run.scenario {
        rows.push(("workload", workload(scenario)));
        rows.push(("server", server(scenario)));
    }
    for tested in run.disks.iter().filter(|disk| disk.under_test) {
        rows.push(("disk", disk(tested)));
    }
    let others = run.disks.iter().filter(|disk| !disk.under_test);
    let others: Vec<&str> = others.map(|disk| disk.name.as_str()).collect();
    if !others.is_empty() {
        rows.push(("not watched", others.join(", ")));
    }
    rows
}

/// Describes a thread in the heading of its table.
pub(super) fn thread(thread: &Thread) -> String {
    let role = match (thread.role, thread.vcpu) {
        (Role::Vcpu, Some(number)) => format!("vCPU {number}"),
        (Role::Vcpu, None) => "vCPU".to_owned(),
        (Role::Main, _) => "main loop".to_owned(),
        (Role::Io, _) => "I/O thread".to_owned(),
        (Role::Pool, _) => "thread of the pool".to_owned(),
        (Role::Other, _) => "other thread".to_owned(),
    };
    // If the run does not list the thread, only its ID is known.
    let name = match thread.name.as_str() {
        "" => format!("thread {}", thread.tid),
        name => format!("{name}, thread {}", thread.tid),
    };
    match thread.pid {
        0 => format!("{name} ({role})"),
        pid => format!("{name} of process {pid} ({role})"),
    }
}

/// Returns a call's name with parentheses: `pread64()`, but `ioctl(KVM_RUN)` as it is.
pub(super) fn call(name: &str) -> String {
    match name.ends_with(')') {
        true => name.to_owned(),
        false => format!("{name}()"),
    }
}

/// Returns the wiki's name of the user-space time after a call: `ioctl_post` for `ioctl(KVM_RUN)`.
pub(super) fn post(name: &str) -> String {
    let bare = name.split('(').next().unwrap_or(name);
    format!("{bare}_post")
}

pub(super) fn collectors(traced: &[String]) -> String {
    match traced {
        [] => "nothing".to_owned(),
        traced => traced.join(", "),
    }
}

/// Describes the lost events, by stream.
pub(super) fn lost(truth: &Truth, count: Count) -> String {
    let streams = truth.lost.iter().map(|(stream, lost)| {
        let s = if *lost == 1 { "" } else { "s" };
        format!("{} event{s} of {stream}", count(*lost))
    });
    streams.collect::<Vec<_>>().join(", ")
}

/// Describes how requests reached the server.
pub(super) fn delivery(truth: &Truth) -> String {
    let known = truth.kicked + truth.batched + truth.polled;
    let of = |count: u64, what: &str| match count {
        0 => String::new(),
        count => {
            let share = count as f64 * 100.0 / truth.joined.max(1) as f64;
            format!("{share:.1}% {what}")
        }
    };
    listed([
        of(truth.kicked, "kicked"),
        of(truth.batched, "with another's kick (batched)"),
        of(truth.polled, "polled"),
        of(truth.joined.saturating_sub(known), "unknown"),
    ])
}

/// Describes how the host's block layer carried out the requests.
pub(super) fn hosts(truth: &Truth, count: Count) -> String {
    let classes = truth.hosts.iter();
    listed(classes.map(|(class, requests)| format!("{} {}", count(*requests), names::host(*class))))
}

/// Describes how the clocks were related, and the largest error.
pub(super) fn clocks(truth: &Truth, duration: fn(f64) -> String) -> String {
    let error = |error: Option<i64>| match error {
        Some(ns) => format!("error at most {}", duration(ns as f64)),
        None => "error unknown".to_owned(),
    };
    let here = match truth.clock_method.as_str() {
        "" if truth.remote_clock_method.is_some() => "one clock for this host".to_owned(),
        "" => "one clock for all".to_owned(),
        method => format!("{method}; {}", error(truth.clock_error_ns)),
    };
    match &truth.remote_clock_method {
        None => here,
        Some(_) if truth.remote_clock_error_ns.is_none() => {
            format!("{here}; the remote host's is not related to it")
        }
        Some(method) => format!(
            "{here}; the remote host's by {method}; {}, in what is each way of the network, and none \
             in what both take",
            error(truth.remote_clock_error_ns)
        ),
    }
}
