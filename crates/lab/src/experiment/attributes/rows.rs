//! Rows of the table: measures by name, and texts.

use std::collections::BTreeMap;

use fathom_run::SheetRow;

use super::Technology;
use crate::bed::instance::Kind;

/// Rows with measures: heading and name of the measure.
const MEASURED: &[(&str, &str)] = &[
    ("CPU: sorting", "cpu"),
    ("memory access: one read", "memory-access"),
    ("memory of an idle instance", "memory"),
    ("memory kept by its kernel", "memory.kernel"),
    ("start-up", "start-up"),
    ("I/O latency: 4k read", "io.latency"),
    ("I/O throughput: 128k reads", "io.throughput"),
    ("p99 of 4k reads, alone", "p99.alone"),
    ("ratio with a neighbour on the disk", "neighbour.disk"),
    (
        "ratio with that neighbour limited",
        "neighbour.disk-limited",
    ),
    ("p99 of 4k reads, alone on one CPU", "p99.pinned"),
    ("ratio with a neighbour on the CPU", "neighbour.cpu"),
    ("ratio with that neighbour limited", "neighbour.cpu-limited"),
    ("CPU cap: set", "cap.set"),
    ("CPU cap: got", "cap.got"),
    ("events of the host about it", "events.host"),
    ("events of its own", "events.own"),
    ("processes visible to the host", "processes.seen"),
];

type Words = fn(Kind) -> &'static str;

/// Rows with texts: heading, and the text for each kind of instance.
const SAID: &[(&str, Words)] = &[
    ("CPU allocation", |kind| match kind {
        Kind::Bare => "all",
        Kind::Container => "any share",
        Kind::Kvm | Kind::Tcg | Kind::Libguestfs => "its vCPUs",
        Kind::Uml => "one CPU",
    }),
    ("memory allocation", |kind| match kind {
        Kind::Bare => "shared",
        Kind::Container => "shared, to a limit",
        Kind::Kvm | Kind::Tcg | Kind::Uml | Kind::Libguestfs => "fixed",
    }),
    ("resource controls", |kind| match kind {
        Kind::Bare | Kind::Container | Kind::Uml => "the OS's",
        Kind::Kvm | Kind::Tcg | Kind::Libguestfs => "the OS's and QEMU's",
    }),
    ("complexity", |kind| match kind {
        Kind::Bare => "none",
        Kind::Container => "namespaces",
        Kind::Kvm => "hypervisor, devices",
        Kind::Tcg | Kind::Libguestfs => "a whole machine",
        Kind::Uml => "a kernel's port",
    }),
    ("other operating systems", |kind| match kind {
        Kind::Bare | Kind::Container => "no",
        Kind::Kvm | Kind::Tcg | Kind::Libguestfs => "yes",
        Kind::Uml => "other Linux",
    }),
];

/// Returns all rows, in the order in which they are shown.
pub fn all() -> Vec<SheetRow> {
    let measured = MEASURED.iter().map(|(heading, measure)| SheetRow {
        heading: (*heading).to_owned(),
        measure: Some((*measure).to_owned()),
        said: BTreeMap::new(),
    });
    let said = SAID.iter().map(|(heading, words)| SheetRow {
        heading: (*heading).to_owned(),
        measure: None,
        said: { Technology::ALL.iter() }
            .map(|one| (one.name().to_owned(), words(one.kind()).to_owned()))
            .collect(),
    });
    measured.chain(said).collect()
}
