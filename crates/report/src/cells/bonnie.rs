//! The layout of bonnie++'s own table, for runs whose measures are bonnie++'s phases:
//! `put-block.throughput`, `put-block.cpu`, `put-block.latency`. Renderers draw the table.

use fathom_run::Unit;

use super::points::Settings;
use super::table::{Figure, Point, Table};
use super::words::{self, Scale};

/// Number of units of 1024 bytes, in which bonnie++ counts, per MB.
const KIB_PER_MB: f64 = 1e6 / 1024.0;

/// A part of the table with its own headings.
pub(super) struct Part {
    pub(super) groups: &'static [Group],
}

/// Phases below one heading.
pub(super) struct Group {
    pub(super) heading: &'static str,
    pub(super) phases: &'static [Phase],
}

/// A phase of bonnie++, with two columns.
pub(super) struct Phase {
    pub(super) heading: &'static str,
    /// The part of its measures' names before the dot.
    name: &'static str,
    /// The rate is in bytes; otherwise in operations.
    is_bytes: bool,
}

const fn bytes(heading: &'static str, name: &'static str) -> Phase {
    Phase {
        heading,
        name,
        is_bytes: true,
    }
}

const fn operations(heading: &'static str, name: &'static str) -> Phase {
    Phase {
        heading,
        name,
        is_bytes: false,
    }
}

pub(super) const PARTS: [Part; 2] = [
    Part {
        groups: &[
            Group {
                heading: "Sequential Output",
                phases: &[
                    bytes("Per Chr", "putc"),
                    bytes("Block", "put-block"),
                    bytes("Rewrite", "rewrite"),
                ],
            },
            Group {
                heading: "Sequential Input",
                phases: &[bytes("Per Chr", "getc"), bytes("Block", "get-block")],
            },
            Group {
                heading: "Random",
                phases: &[operations("Seeks", "seeks")],
            },
        ],
    },
    Part {
        groups: &[
            Group {
                heading: "Sequential Create",
                phases: &[
                    operations("Create", "seq-create"),
                    operations("Read", "seq-read"),
                    operations("Delete", "seq-delete"),
                ],
            },
            Group {
                heading: "Random Create",
                phases: &[
                    operations("Create", "ran-create"),
                    operations("Read", "ran-read"),
                    operations("Delete", "ran-delete"),
                ],
            },
        ],
    },
];

/// The texts in a phase's two columns for one point; empty if not measured.
#[derive(Default)]
pub(super) struct Entry {
    /// K/sec, or operations per second.
    pub(super) rate: String,
    pub(super) cpu: String,
    pub(super) latency: String,
    /// Ratio of the rate to the first point's.
    pub(super) ratio: String,
    pub(super) interval: String,
}

impl Part {
    pub(super) fn phases(&self) -> impl Iterator<Item = &'static Phase> + Clone {
        self.groups.iter().flat_map(|group| group.phases)
    }

    /// Returns whether the run has any measure of this part.
    pub(super) fn is_in(&self, table: &Table) -> bool {
        let mut phases = self.phases();
        phases.any(|phase| table.measures.iter().any(|one| phase.claims(&one.name)))
    }
}

impl Phase {
    pub(super) fn unit(&self) -> &'static str {
        if self.is_bytes { "K/sec" } else { "/sec" }
    }

    fn rate(&self) -> String {
        let what = if self.is_bytes { "throughput" } else { "rate" };
        format!("{}.{what}", self.name)
    }

    fn claims(&self, measure: &str) -> bool {
        let of = measure.strip_prefix(self.name);
        let rest = of.and_then(|rest| rest.strip_prefix('.'));
        rest.is_some_and(|rest| ["throughput", "rate", "cpu", "latency"].contains(&rest))
    }

    pub(super) fn entry(&self, point: &Point) -> Entry {
        let figure = |what: &str| point.measures.get(&format!("{}.{what}", self.name));
        let rate = point.measures.get(&self.rate());
        let write = |figure: Option<&Figure>, write: fn(f64) -> String| {
            figure.map_or_else(String::new, |figure| write(figure.median))
        };
        let in_kib = |mb: f64| written(mb * KIB_PER_MB);
        let ratio = rate.and_then(|figure| figure.ratio.as_ref());
        Entry {
            rate: write(rate, if self.is_bytes { in_kib } else { written }),
            cpu: write(figure("cpu"), percent),
            latency: write(figure("latency"), latency),
            ratio: ratio.map(words::marked).unwrap_or_default(),
            interval: ratio.map_or_else(String::new, |one| words::ratio_interval(one.interval)),
        }
    }
}

/// Formats a value like bonnie++: small values have a decimal.
fn written(value: f64) -> String {
    match value.abs() {
        size if size >= 1e7 => format!("{value:.1e}"),
        size if size < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn percent(value: f64) -> String {
    match value.abs() {
        size if size >= 1e4 => format!("{value:.0e}"),
        _ => format!("{value:.0}"),
    }
}

fn latency(ns: f64) -> String {
    let scale = Scale::of(Unit::Nanoseconds, std::iter::once(ns));
    format!("{} {}", scale.write(ns), scale.symbol)
}

/// Returns whether bonnie++'s table shows a measure, so that other tables can leave it out.
pub(super) fn has(measure: &str) -> bool {
    let mut phases = PARTS.iter().flat_map(Part::phases);
    phases.any(|phase| phase.claims(measure))
}

/// Returns whether the run has any of bonnie++'s measures.
pub(super) fn is_shown(table: &Table) -> bool {
    PARTS.iter().any(|part| part.is_in(table))
}

/// Returns the label of a point.
pub(super) fn label(settings: &Settings) -> String {
    let values: Vec<&str> = settings.values().map(String::as_str).collect();
    match (values.is_empty(), settings.len()) {
        (true, _) => String::new(),
        (_, 1) => values.concat(),
        _ => words::settings(settings),
    }
}

/// Explains the figures that the table has.
pub(super) fn explained(table: &Table) -> String {
    let entries = || {
        let phases = PARTS.iter().flat_map(Part::phases);
        phases.flat_map(|phase| table.points.iter().map(|point| phase.entry(point)))
    };
    let has = |text: fn(&Entry) -> &str| entries().any(|entry| !text(&entry).is_empty());
    let bytes = PARTS.iter().flat_map(Part::phases).any(|phase| {
        let measured = |point: &Point| point.measures.contains_key(&phase.rate());
        phase.is_bytes && table.points.iter().any(measured)
    });
    let of: [(bool, &str); 4] = [
        (bytes, "K/sec are 1024 bytes"),
        (
            has(|entry| &entry.cpu),
            "%CP is the CPU time of its process in the guest",
        ),
        (
            has(|entry| &entry.latency),
            "latency is the longest operation",
        ),
        (
            has(|entry| &entry.ratio),
            "a ratio is to the first row, and ~ is within noise",
        ),
    ];
    let said = of.iter().filter(|(is_there, _)| *is_there);
    let said: Vec<&str> = said.map(|(_, words)| *words).collect();
    let figures = table
        .points
        .iter()
        .flat_map(|point| point.measures.values());
    let most = figures.map(|figure| figure.rounds.len()).max();
    format!(
        "As bonnie++ prints it: {}. Phases that were too fast to measure, or not requested, are \
         left out. {}",
        said.join(", "),
        words::rounds_explained(most.unwrap_or(0))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_of_phases_are_known_by_their_whole_names() {
        for name in [
            "putc.cpu",
            "put-block.throughput",
            "seeks.rate",
            "ran-delete.latency",
        ] {
            assert!(has(name), "{name}");
        }
        for name in [
            "putc",
            "putc.cpu.mean",
            "put-blocks.cpu",
            "iops",
            "cpu.host",
            "xputc.cpu",
        ] {
            assert!(!has(name), "{name}");
        }
    }

    #[test]
    fn figures_are_never_wide() {
        for (value, text) in [
            (263.5, "263.5"),
            (74157.0, "74157"),
            (9_876_543.0, "9876543"),
            (1e300, "1.0e300"),
            (0.04, "0.0"),
        ] {
            assert_eq!(written(value), text);
        }
        assert_eq!(
            (percent(87.4).as_str(), percent(1e300).as_str()),
            ("87", "1e300")
        );
        assert_eq!(latency(31_893_000.0), "31.89 ms");
        assert!(latency(1e300).len() <= 12, "{}", latency(1e300));
    }
}
