//! Figures and sentences about experiments, used by all renderers.

use fathom_limiter::{UNKNOWN, named};
use fathom_run::{Beside, Unit};

use super::bonnie;
use super::cell::Column;
use super::points::Settings;
use super::statistics::{ENOUGH, Interval};
use super::table::Table;
use super::verdict::{FALSE_ALARMS, Ratio, Verdict};
use crate::render::facts;
use crate::render::text::{date, plural};

/// Maximum number of rows in pages and on terminals; JSON and CSV have all.
pub(super) const MOST_ROWS: usize = 1_000;

/// Part of the watched time for which a load runs, below which the rest is noticeable in its costs.
const LEAST_PART: f64 = 0.9;

/// How the figures of a column are written: all in one unit, with as many decimals as give the
/// greatest four digits.
pub(super) struct Scale {
    by: f64,
    pub(super) symbol: &'static str,
    decimals: usize,
}

impl Scale {
    pub(super) fn of(unit: Unit, values: impl Iterator<Item = f64>) -> Scale {
        let (mut most, mut whole) = (0.0, true);
        for value in values {
            most = value.abs().max(most);
            whole &= value.fract() == 0.0;
        }
        let steps: &[(f64, &'static str)] = match unit {
            Unit::PerSecond => &[(1.0, "/s"), (1e3, "k/s"), (1e6, "M/s")],
            Unit::MegabytesPerSecond => &[(1.0, "MB/s"), (1e3, "GB/s")],
            Unit::Nanoseconds => &[(1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s")],
            Unit::Seconds => &[(1e-6, "us"), (1e-3, "ms"), (1.0, "s")],
            Unit::Count => &[(1.0, ""), (1e3, "k"), (1e6, "M")],
            Unit::Bytes => &[(1.0, "bytes"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB")],
            other => &[(1.0, other.symbol())],
        };
        // Except for seconds, four digits are as readable as one digit with three decimals.
        let least = if unit == Unit::Seconds { 1.0 } else { 10.0 };
        let fitting = steps.iter().rev().find(|(by, _)| most >= by * least);
        let (by, symbol) = *fitting.unwrap_or(&steps[0]);
        let digits = (most / by).max(1e-6).log10().floor();
        Scale {
            by,
            symbol,
            decimals: match whole && by == 1.0 {
                true => 0,
                false => (3.0 - digits).clamp(0.0, 6.0) as usize,
            },
        }
    }

    /// Returns a scale without a unit, for headings that name it. The greatest value has three
    /// digits.
    pub(super) fn plain(unit: Unit, values: impl Iterator<Item = f64>) -> Scale {
        let most = values.map(f64::abs).fold(1e-6, f64::max);
        // Large requests cost less than a percent, small ones much more.
        let least = match unit {
            Unit::PercentPerMegabyte | Unit::CpuMicrosecondsPerRequest => 2.0,
            _ => 0.0,
        };
        Scale {
            by: 1.0,
            symbol: "",
            decimals: (2.0 - most.log10().floor()).clamp(least, 6.0) as usize,
        }
    }

    /// Returns the scale for pages, which have the micro sign.
    pub(super) fn for_pages(self) -> Scale {
        let symbol = match self.symbol {
            "us" => "\u{b5}s",
            "us CPU/request" => "\u{b5}s CPU/request",
            other => other,
        };
        Scale { symbol, ..self }
    }

    pub(super) fn write(&self, value: f64) -> String {
        let scaled = value / self.by;
        let last = 10f64.powi(-(self.decimals as i32));
        // With decimals, a value of at most one digit would lose precision.
        let small = last * if self.decimals > 0 { 10.0 } else { 0.5 };
        match scaled.abs() {
            size if size >= 1e9 => format!("{scaled:.2e}"),
            // Two digits, unless the text becomes too wide.
            size if size < small && size >= 1e-3 => {
                format!("{scaled:.*}", (1.0 - size.log10().floor()) as usize)
            }
            size if size < 0.5 * last && size > 0.0 => format!("{scaled:.1e}"),
            _ => format!("{scaled:.*}", self.decimals),
        }
    }

    pub(super) fn interval(&self, interval: Option<Interval>) -> String {
        let write = |(low, high)| format!("{}..{}", self.write(low), self.write(high));
        interval.map_or(String::new(), write)
    }

    /// Returns the name with the unit, such as `iops (k/s)`.
    pub(super) fn heading(&self, name: &str) -> String {
        match self.symbol {
            "" => name.to_owned(),
            symbol => format!("{name} ({symbol})"),
        }
    }
}

/// Writes a ratio such as `1.04`; ratios far from 1 have fewer decimals, or more.
fn times(ratio: f64) -> String {
    match ratio {
        _ if ratio >= 1e6 || (ratio > 0.0 && ratio < 5e-4) => format!("{ratio:.1e}"),
        _ if ratio >= 100.0 => format!("{ratio:.0}"),
        _ if ratio >= 10.0 => format!("{ratio:.1}"),
        // An effect outside of noise must not be rounded to 1.
        _ if ratio != 1.0 && (ratio - 1.0).abs() < 0.01 => format!("{ratio:.3}"),
        _ if ratio >= 0.1 || ratio == 0.0 => format!("{ratio:.2}"),
        _ => format!("{ratio:.4}"),
    }
}

/// Writes the width of an interval, such as `5%` or `8.1%`.
pub(super) fn width(width: f64) -> String {
    let percent = width * 100.0;
    match percent.is_finite() {
        true if percent >= 10.0 || percent.fract() == 0.0 => format!("{percent:.0}%"),
        true if percent >= 1.0 => format!("{percent:.1}%"),
        true => format!("{percent:.2}%"),
        false => "infinitely".into(),
    }
}

/// Writes a ratio such as `1.04x`.
pub(super) fn ratio(ratio: f64) -> String {
    format!("{}x", times(ratio))
}

/// Writes a ratio with a mark: `~1.04x` if no difference is shown, `?1.04x` without enough rounds.
pub(super) fn marked(of: &Ratio) -> String {
    let mark = match of.verdict {
        Verdict::Better | Verdict::Worse => "",
        Verdict::NoDifferenceShown => "~",
        Verdict::NotEnoughRounds { .. } => "?",
    };
    format!("{mark}{}", ratio(of.median))
}

pub(super) fn ratio_interval(interval: Option<Interval>) -> String {
    interval.map_or(String::new(), |(low, high)| {
        format!("{}..{}", times(low), times(high))
    })
}

/// Returns a verdict in words.
pub(super) fn meaning(verdict: Verdict) -> String {
    match verdict {
        Verdict::Better => "better".into(),
        Verdict::Worse => "worse".into(),
        Verdict::NoDifferenceShown => "no difference shown".into(),
        Verdict::NotEnoughRounds { more } => format!("not enough rounds: {more} more"),
    }
}

/// Returns a verdict in words: `faster` or `slower` for measures of speed.
pub(super) fn verdict(of: Verdict, column: &Column) -> String {
    let is_speed = matches!(
        column.unit,
        Unit::PerSecond | Unit::MegabytesPerSecond | Unit::Nanoseconds | Unit::Seconds
    );
    match of {
        Verdict::Better if is_speed => "faster".into(),
        Verdict::Worse if is_speed => "slower".into(),
        other => meaning(other),
    }
}

/// Joins settings, such as `aio=native, disk=fathom`.
pub(super) fn settings(settings: &Settings) -> String {
    let pairs = settings
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(", ")
}

/// Returns the suspected limiters of points, a line each.
pub(super) fn judged(table: &Table) -> impl Iterator<Item = String> {
    let shown = table.points.iter().take(MOST_ROWS);
    shown.filter_map(|point| {
        let (verdict, rule) = (point.verdict.as_ref()?, point.limiter.as_deref());
        let line = named(rule.unwrap_or(UNKNOWN), verdict);
        Some(format!("{}: {line}", label(&point.settings)))
    })
}

/// Returns the knees of curves with their suspected limiters, a line each.
pub(super) fn knees(table: &Table) -> impl Iterator<Item = String> {
    let main = table.main.as_deref().unwrap_or_default();
    table.knees.iter().take(MOST_ROWS).map(move |knee| {
        let of = match knee.settings.is_empty() {
            true => String::new(),
            false => format!("{}: ", settings(&knee.settings)),
        };
        let (axis, at, beyond, gain) = (&knee.axis, &knee.at, &knee.beyond, knee.gain);
        let before = if knee.or_before { " or before" } else { "" };
        let limiter = knee.verdict.as_ref();
        let limiter = limiter.map_or(String::new(), |verdict| format!("; at {beyond}: {verdict}"));
        format!(
            "{of}{main} has its knee at {axis}={at}{before}: up to {beyond}, each further unit gains {gain:.2} of \
             what each of the first gained{limiter}"
        )
    })
}

/// Returns a point's name in a line.
pub(super) fn label(of: &Settings) -> String {
    match of.is_empty() {
        true => "the only point".to_owned(),
        false => settings(of),
    }
}

/// Returns the facts of a run, each as a name and a text.
pub(super) fn facts(table: &Table) -> Vec<(&'static str, String)> {
    let mut rows = vec![("recorded", date(table.created))];
    rows.extend(facts::machines(&table.environment));
    if !table.parameters.is_empty() {
        rows.push(("parameters", settings(&table.parameters)));
    }
    let rounds = plural(table.rounds.into(), "round");
    rows.push((
        "experiment",
        format!(
            "{}, {rounds} of each point, seed {}",
            table.experiment, table.seed
        ),
    ));
    rows.extend(table.ended.clone().map(|why| ("ended", why)));
    rows
}

/// Returns a warning about missing cells, and how to run them.
pub(super) fn missing(table: &Table) -> Option<String> {
    let there = table.cells.len();
    let line = || {
        format!(
            "{there} of {} cells are complete (fathom lab run --continue RUN runs the rest)",
            table.planned
        )
    };
    (there < table.planned).then(line)
}

/// Returns how to show the breakdowns of cells that hold a run directory.
pub(super) fn breakdowns(table: &Table) -> Option<String> {
    let first = table.breakdowns.first()?;
    let count = table.breakdowns.len() as u64;
    let example = format!("fathom report RUN/cells/{first}");
    Some(match count {
        1 => format!("The cell {first} holds a breakdown of its requests: {example} prints it"),
        _ => format!(
            "{} hold a breakdown of their requests: fathom report RUN/cells/ID prints each, such as \
             {example}",
            plural(count, "cell")
        ),
    })
}

/// Returns notes on figures and intervals, for those that the table of points has. Bonnie++'s
/// measures have a table of their own.
pub(super) fn explained(table: &Table) -> Vec<String> {
    let points = &table.points;
    let is_shown = |name: &str| !bonnie::has(name);
    let shown = || {
        let all = points.iter().flat_map(|point| &point.measures);
        all.filter(|(name, _)| is_shown(name))
            .map(|(_, figure)| figure)
    };
    let all = points.iter().flat_map(|point| point.measures.values());
    let most = all.map(|figure| figure.rounds.len()).max();
    let mut lines = vec![rounds_explained(most.unwrap_or(0))];
    if shown().any(|figure| figure.ratio.is_some()) {
        let is_axis = |beside: &&Beside| table.axes.contains(&beside.parameter);
        let row = match table.beside.as_ref().filter(is_axis) {
            Some(beside) => format!("first row that differs in {} alone", beside.parameter),
            None => "first row".to_owned(),
        };
        let base = format!("Ratios are to the {row}, of each round's own pair");
        lines.push(verdicts_explained(&base));
        lines.extend(more_rounds(table));
    }
    let has_bare = table.main.as_deref().is_some_and(is_shown);
    if has_bare && points.iter().any(|point| point.vs_bare.is_some()) {
        lines.push("vs bare: to the same work on the bare device, in the same round.".into());
    }
    lines.extend(short_loads(table));
    lines
}

/// Returns the note above rankings: what the figures are, and which point is the base.
pub(super) fn rankings_explained(table: &Table) -> Option<String> {
    let base = label(&table.points.first()?.settings);
    Some(format!(
        "Each setting alone against the base ({base}), whose value is in brackets. The greatest \
         effect is first, and effects that are not shown are last."
    ))
}

pub(super) fn rounds_explained(most: usize) -> String {
    match most {
        0 => "No cell is complete.".into(),
        1 => "With a single round, there are no intervals and no verdicts.".into(),
        2..ENOUGH => format!(
            "Medians over rounds. With fewer than {ENOUGH} rounds, an interval is from the least to \
             the greatest."
        ),
        _ => format!(
            "Medians over rounds, with 95% intervals; of fewer than {ENOUGH} rounds, from the least to \
             the greatest."
        ),
    }
}

/// Returns the note on verdicts, behind what the ratios are.
pub(super) fn verdicts_explained(base: &str) -> String {
    let wrong = FALSE_ALARMS * 100.0;
    format!(
        "{base}. ~: no difference is shown. ?: not enough rounds for a verdict. If nothing differs, \
         the rows of a measure have a verdict in at most {wrong:.0}% of runs."
    )
}

/// Returns how many rounds are missing for verdicts on all rows, and how to run them.
pub(super) fn more_rounds(table: &Table) -> Option<String> {
    let figures = table
        .points
        .iter()
        .flat_map(|point| point.measures.values());
    let missing = figures.filter_map(|figure| match figure.ratio.as_ref()?.verdict {
        Verdict::NotEnoughRounds { more } => Some(more),
        _ => None,
    });
    let more = missing.max()?;
    let all = table.rounds.saturating_add(more);
    Some(format!(
        "For verdicts on all rows, {} would be enough (of a run of the lab: fathom lab run --continue \
         RUN --rounds {all}).",
        plural(more.into(), "more round")
    ))
}

/// Returns a warning if CPU time was counted much longer than loads ran: the start of a load is a
/// part of each request's `cpu.*` then.
pub(super) fn short_loads(table: &Table) -> Option<String> {
    let has_costs = |column: &&Column| column.unit == Unit::CpuMicrosecondsPerRequest;
    let costs = table.measures.iter().find(has_costs)?;
    let parts = table.cells.iter().filter_map(|cell| cell.load_part);
    let short = parts.filter(|part| *part < LEAST_PART);
    let (count, least) = short.fold((0u64, 1.0), |(count, least), part| {
        (count + 1, f64::min(least, part))
    });
    (count > 0).then(|| {
        format!(
            "CPU time per request ({}) is too high in {count} of {}: the load ran for only {:.0}% of the \
             time in which CPUs were watched, and its start counts, too. A longer --runtime makes that \
             part small.",
            costs.name,
            plural(table.cells.len() as u64, "cell"),
            least * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::Better;

    #[test]
    fn figures_are_written_for_people_and_never_wide() {
        let told = |unit, values: &[f64]| {
            let scale = Scale::of(unit, values.iter().copied());
            let texts: Vec<String> = values.iter().map(|value| scale.write(*value)).collect();
            scale.heading("m") + " " + &texts.join(" ")
        };
        let cases = [
            (
                Unit::PerSecond,
                &[123_456.0, 9_000.0][..],
                "m (k/s) 123.5 9.0",
            ),
            (Unit::PerSecond, &[850.0], "m (/s) 850"),
            (
                Unit::PerSecond,
                &[230e3, 135.0, 0.0],
                "m (k/s) 230.0 0.14 0.0",
            ),
            (Unit::Nanoseconds, &[85_400.0, 1_000.0], "m (us) 85.40 1.00"),
            (Unit::Nanoseconds, &[12e6, 250.0], "m (ms) 12.00 2.5e-4"),
            (Unit::Seconds, &[0.25], "m (ms) 250.0"),
            (Unit::Count, &[0.0], "m 0"),
            (
                Unit::PercentPerMegabyte,
                &[0.01234],
                "m (% per MB/s) 0.01234",
            ),
            (Unit::Bytes, &[1e308], "m (GB) 1.00e299"),
            (Unit::Count, &[-12.5], "m -12.50"),
            (Unit::Seconds, &[5.0, 0.25], "m (s) 5.000 0.250"),
            (Unit::Seconds, &[500.0, 0.021], "m (s) 500.0 0.021"),
            (Unit::Count, &[-12.0], "m -12"),
        ];
        for (unit, values, expected) in cases {
            assert_eq!(told(unit, values), expected);
        }
    }

    #[test]
    fn verdicts_on_speed_have_words_of_their_own() {
        let told = |unit, of| {
            let (name, better) = (String::new(), Better::Higher);
            verdict(of, &Column { name, unit, better })
        };
        for (unit, words) in [
            (Unit::Seconds, ["faster", "slower"]),
            (Unit::PerSecond, ["faster", "slower"]),
            (Unit::Bytes, ["better", "worse"]),
        ] {
            let said = [Verdict::Better, Verdict::Worse].map(|of| told(unit, of));
            assert_eq!(said, words);
        }
        let few = Verdict::NotEnoughRounds { more: 3 };
        assert_eq!(told(Unit::Seconds, few), "not enough rounds: 3 more");
        let marks = [Verdict::Better, Verdict::NoDifferenceShown, few];
        let marks = marks.map(|of| marked(&Ratio::told(1.5, of)));
        assert_eq!(marks, ["1.50x", "~1.50x", "?1.50x"]);
    }

    #[test]
    fn ratios_have_the_decimals_that_matter() {
        let told = [1.0, 0.995, 0.5, 12.345, 3456.7, 0.0123, 0.0, 1e9, 1e-9].map(times);
        assert_eq!(
            told,
            [
                "1.00", "0.995", "0.50", "12.3", "3457", "0.0123", "0.00", "1.0e9", "1.0e-9"
            ]
        );
    }
}
