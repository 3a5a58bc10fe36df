//! What was measured, and on what.

use fathom_run::{Disk, Machine, Scenario};

use super::page::Page;
use crate::analysis::Analysis;
use crate::render::text::{date, plural, size};

pub(super) fn show(page: &mut Page, analysis: &Analysis) {
    page.heading(&analysis.title);
    page.fact("recorded", &date(analysis.created));
    let environment = &analysis.environment;
    if let Some(guest) = &environment.guest {
        page.fact("guest", &machine(guest));
    }
    page.fact("host", &machine(&environment.host));
    page.fact("software", &software(analysis));
    if let Some(scenario) = &analysis.scenario {
        page.fact("workload", &workload(scenario));
        page.fact("server", &server(scenario));
    }
    for disk in analysis.disks.iter().filter(|disk| disk.under_test) {
        page.fact("disk", &disk_under_test(disk));
    }
    let others = analysis.disks.iter().filter(|disk| !disk.under_test);
    let others: Vec<&str> = others.map(|disk| disk.name.as_str()).collect();
    if !others.is_empty() {
        page.fact("not watched", &others.join(", "));
    }
    if environment.stretched {
        page.warning(
            "Times are stretched: the host is itself emulated. They check the method and say \
             nothing about speed.",
        );
    }
}

/// A kernel and its machine in one line.
pub(super) fn machine(machine: &Machine) -> String {
    let mut parts = Vec::new();
    let mut add = |before: &str, text: &str| {
        if !text.is_empty() {
            parts.push(format!("{before}{text}"));
        }
    };
    add("Linux ", &machine.kernel);
    add("", &machine.cpu);
    if machine.cpus > 0 {
        add("", &plural(u64::from(machine.cpus), "CPU"));
    }
    add("clock source ", &machine.clock_source);
    add("traced by ", &machine.trace_clock);
    or_unknown(parts)
}

fn software(analysis: &Analysis) -> String {
    let environment = &analysis.environment;
    let mut parts = Vec::new();
    match environment.accelerator.as_str() {
        "" => {}
        name => parts.push(format!("accelerator {name}")),
    }
    // QEMU's own line begins with the program's name.
    match &environment.qemu {
        Some(version) if version.contains("QEMU") => parts.push(version.clone()),
        Some(version) => parts.push(format!("QEMU {version}")),
        None => {}
    }
    if !environment.fathom.is_empty() {
        let name = environment.fathom.trim_start_matches("fathom ");
        parts.push(format!("Fathom {name}"));
    }
    or_unknown(parts)
}

pub(super) fn workload(scenario: &Scenario) -> String {
    let mut parts = Vec::new();
    if !scenario.rw.is_empty() {
        parts.push(scenario.rw.clone());
    }
    if scenario.block_size > 0 {
        parts.push(format!("{} blocks", size(scenario.block_size)));
    }
    if scenario.iodepth > 0 {
        parts.push(format!("depth {}", scenario.iodepth));
    }
    if scenario.queues > 0 {
        parts.push(plural(u64::from(scenario.queues), "queue"));
    }
    or_unknown(parts)
}

pub(super) fn server(scenario: &Scenario) -> String {
    let named = |name: &str, value: &str| (!value.is_empty()).then(|| format!("{name}{value}"));
    let parts = [
        named("", &scenario.server),
        named("aio=", &scenario.aio),
        named("cache=", &scenario.cache),
        named(
            "",
            if scenario.polling {
                "polls"
            } else {
                "does not poll"
            },
        ),
    ];
    or_unknown(parts.into_iter().flatten().collect())
}

fn disk_under_test(disk: &Disk) -> String {
    let mut parts = vec![disk.name.clone()];
    if !disk.device.is_empty() {
        parts.push(disk.device.clone());
    }
    if let Some(name) = &disk.guest_name {
        parts.push(format!("{name} in the guest"));
    }
    if let Some(image) = &disk.image {
        parts.push(image.display().to_string());
    }
    if let Some(host) = &disk.host {
        let scheduler = match host.scheduler.as_str() {
            "" => String::new(),
            name => format!(" (scheduler {name})"),
        };
        parts.push(format!("on {}{scheduler}", host.name));
    }
    parts.push(match &disk.identified_by {
        Some(how) => format!("identified by {how}"),
        None => "unidentified: its kicks and interrupts cannot be told from other devices'".into(),
    });
    parts.join(", ")
}

fn or_unknown(parts: Vec<String>) -> String {
    if parts.is_empty() {
        "unknown".to_owned()
    } else {
        parts.join(", ")
    }
}
