//! The sentence that begins the report of an experiment: what differs or limits, and the evidence.

use fathom_limiter::UNKNOWN;
use fathom_run::Better;

use super::cell::{Column, clipped};
use super::compare::{Compared, Comparison};
use super::points::Settings;
use super::table::{Figure, Point, Table};
use super::verdict::{Ratio, Verdict};
use super::words::{self, Scale};
use crate::render::answer::Suspect;

/// Longest label of a point in characters; of a longer one, only the settings that differ from the
/// first point are named.
const LONGEST_LABEL: usize = 60;
/// Maximum number of characters of names without spaces, which cannot be wrapped.
const LONGEST_WORD: usize = 80;
/// Maximum number of measures that the answer compares.
const MOST_MEASURES: usize = 3;

/// The answer of an experiment.
pub(super) struct Answer {
    pub(super) sentence: String,
    /// Further lines: the limiters of all points, and where the CPU time goes.
    pub(super) more: Vec<String>,
    /// Advice on the limiter, if all points have the same.
    pub(super) advice: Option<&'static str>,
}

/// Answers for the run of an experiment.
pub(super) fn of(table: &Table) -> Answer {
    let done: Vec<&Point> = table.points.iter().filter(|point| point.done > 0).collect();
    let sentence = match done.as_slice() {
        [] => "There is no answer yet: no cell is complete.".to_owned(),
        [only] => alone(table, only),
        several => differences(table, several),
    };
    let suspects: Vec<Suspect> = done.iter().filter_map(|point| of_point(point)).collect();
    let mut more = Vec::new();
    if done.len() > 1 {
        more.extend(limiters(&suspects));
    }
    more.extend(hottest(&done));
    let first = suspects.first().filter(|first| !first.is_unknown());
    let same = first.filter(|first| suspects.iter().all(|one| one.rule == first.rule));
    Answer {
        sentence,
        more,
        advice: same.and_then(Suspect::advice),
    }
}

/// Returns the suspected limiter of a run with a single point.
pub(super) fn suspect(table: &Table) -> Option<Suspect> {
    match table.points.as_slice() {
        [only] => of_point(only),
        _ => None,
    }
}

fn of_point(point: &Point) -> Option<Suspect> {
    let text = point.verdict.clone()?;
    let rule = point.limiter.clone().unwrap_or_else(|| UNKNOWN.into());
    Some(Suspect { rule, text })
}

/// Returns the answer for a single point.
fn alone(table: &Table, point: &Point) -> String {
    let figure = main_of(table, point).and_then(|column| {
        let figure = point.measures.get(&column.name)?;
        let bare = point.vs_bare.as_ref();
        let bare = bare.filter(|_| table.main.as_ref() == Some(&column.name));
        let bare = bare.map(|bare| format!(", {} of the bare device's", words::ratio(bare.median)));
        let value = value(column, figure);
        Some(format!(
            "{} is {value}{}",
            clipped(&column.name, LONGEST_WORD),
            bare.unwrap_or_default()
        ))
    });
    let figure = figure.unwrap_or_else(|| "nothing was measured".into());
    match of_point(point) {
        Some(held) if !held.is_unknown() => format!("Limited by {}; {figure}.", held.line()),
        Some(unknown) => format!("{}: the limiter is {}.", capital(&figure), unknown.line()),
        None => format!(
            "{}; evidence of its limiter was not recorded.",
            capital(&figure)
        ),
    }
}

/// Begins a sentence with a name of a measure, which keeps its letters.
fn capital(figure: &str) -> String {
    match figure.starts_with("nothing") {
        true => figure.replacen('n', "N", 1),
        false => format!("The {figure}"),
    }
}

/// Returns the answer for several points: for each measure that answers for some of them, how they
/// compare and which is best.
fn differences(table: &Table, points: &[&Point]) -> String {
    let mut columns: Vec<&Column> = Vec::new();
    for column in points.iter().filter_map(|point| main_of(table, point)) {
        if !columns.iter().any(|known| known.name == column.name) {
            columns.push(column);
        }
    }
    let of = |column: &&Column| {
        let is_its =
            |point: &&&Point| main_of(table, point).is_some_and(|main| main.name == column.name);
        let its: Vec<&Point> = points.iter().filter(is_its).copied().collect();
        by_measure(table, column, &its)
    };
    let sentences: Vec<String> = columns.iter().take(MOST_MEASURES).filter_map(of).collect();
    match sentences.is_empty() {
        true => "No measure of these points can be better or worse: the table has them.".into(),
        false => sentences.join(" "),
    }
}

fn by_measure(table: &Table, column: &Column, points: &[&Point]) -> Option<String> {
    let of = |point: &&Point| point.measures.get(&column.name).cloned();
    let figures = points.iter().filter_map(|point| Some((*point, of(point)?)));
    let figures: Vec<(&Point, Figure)> = figures.collect();
    let better = |a: &Figure, b: &Figure| match column.better {
        Better::Lower => b.median.total_cmp(&a.median),
        Better::Higher | Better::Neither => a.median.total_cmp(&b.median),
    };
    // The first of several equals.
    let (best, figure) = figures.iter().rev().max_by(|a, b| better(&a.1, &b.1))?;
    let (first, _) = figures.first()?;
    let word = match column.better {
        Better::Lower => "lowest",
        Better::Higher | Better::Neither => "highest",
    };
    let ratios = figures
        .iter()
        .filter_map(|(_, figure)| figure.ratio.as_ref());
    let counts = counts(ratios, column);
    let against = match counts.is_empty() {
        true => String::new(),
        false => format!(" against {}: {counts};", base(table, first)),
    };
    let ratio = figure.ratio.as_ref();
    let ratio = ratio.map_or(String::new(), |ratio| {
        format!(" ({})", words::marked(ratio))
    });
    let limit = of_point(best).filter(|held| !held.is_unknown());
    let limit = limit.map_or(String::new(), |held| {
        format!(", limited by {}", held.line())
    });
    let (name, value) = (clipped(&column.name, LONGEST_WORD), value(column, figure));
    let of = match against.is_empty() {
        true => format!("The {word} {name} is"),
        false => format!("The {name}{against} the {word} is"),
    };
    Some(format!(
        "{of} {value}{ratio} with {}{limit}.",
        short(best, first)
    ))
}

/// Counts the verdicts on ratios, such as `2 faster, 1 without enough rounds`.
fn counts<'a>(ratios: impl Iterator<Item = &'a Ratio>, column: &Column) -> String {
    let mut counts: Vec<(String, u32)> = Vec::new();
    for ratio in ratios {
        let word = match ratio.verdict {
            Verdict::NoDifferenceShown => "without a difference".to_owned(),
            Verdict::NotEnoughRounds { .. } => "without enough rounds".to_owned(),
            of => words::verdict(of, column),
        };
        match counts.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += 1,
            None => counts.push((word, 1)),
        }
    }
    let told = counts.iter().map(|(word, count)| format!("{count} {word}"));
    told.collect::<Vec<_>>().join(", ")
}

/// Returns the name of what the ratios of a table compare with.
fn base(table: &Table, first: &Point) -> String {
    let beside = table.beside.as_ref();
    let beside = beside.filter(|beside| table.axes.contains(&beside.parameter));
    let value = beside.and_then(|beside| {
        let value = first.settings.get(&beside.parameter)?;
        Some(format!("{}={value}", beside.parameter))
    });
    let label = value.unwrap_or_else(|| words::label(&first.settings));
    match label.chars().count() > LONGEST_LABEL {
        true => "the first point".into(),
        false => label,
    }
}

/// Returns the label of a point; of a long one, only what differs from the first point.
pub(super) fn short(point: &Point, first: &Point) -> String {
    let label = words::label(&point.settings);
    if label.chars().count() <= LONGEST_LABEL {
        return label;
    }
    let differs = point.settings.iter();
    let differs = differs.filter(|(name, value)| first.settings.get(*name) != Some(value));
    let differs: Settings = differs.map(|(a, b)| (a.clone(), b.clone())).collect();
    match differs.is_empty() {
        true => "the first point".into(),
        false => clipped(&words::settings(&differs), LONGEST_WORD),
    }
}

/// Returns the measure that answers for a point: the table's main one, else the first of the
/// point's own that can be better, for points of another test.
pub(super) fn main_of<'a>(table: &'a Table, point: &Point) -> Option<&'a Column> {
    let has = |column: &&Column| point.measures.contains_key(&column.name);
    let main = table.main().filter(has);
    let first = |is: fn(Better) -> bool| {
        let mut all = table.measures.iter().filter(has);
        all.find(|column| is(column.better))
    };
    main.or_else(|| first(|better| better == Better::Higher))
        .or_else(|| first(|better| better == Better::Lower))
}

fn value(column: &Column, figure: &Figure) -> String {
    let scale = Scale::of(column.unit, std::iter::once(figure.median));
    let value = format!("{} {}", scale.write(figure.median), scale.symbol);
    value.trim_end().to_owned()
}

/// Returns the limiters of the points and how many points have each, most first.
fn limiters(suspects: &[Suspect]) -> Option<String> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for one in suspects {
        match counts.iter_mut().find(|(known, _)| *known == one.rule) {
            Some((_, count)) => *count += 1,
            None => counts.push((&one.rule, 1)),
        }
    }
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let all = suspects.len();
    let told = counts
        .iter()
        .map(|(rule, count)| format!("{rule} ({count} of {all})"));
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| format!("Limiters of the points: {}.", told.join(", ")))
}

/// Returns the functions that most CPU samples of a profile were in.
fn hottest(points: &[&Point]) -> Option<String> {
    let sampled = points.iter().find(|point| !point.profile.is_empty())?;
    let top = sampled.profile.iter().filter_map(|side| {
        let top = side.top.first()?;
        let (share, symbol, object) = (top.overhead, &top.symbol, &top.object);
        Some(format!("{}: {share:.1}% in {symbol} ({object})", side.side))
    });
    let top: Vec<String> = top.collect();
    let of = match points.len() {
        1 => String::new(),
        _ => format!(" of {}", words::label(&sampled.settings)),
    };
    (!top.is_empty()).then(|| format!("Most CPU time{of}: {}.", top.join("; ")))
}

/// Answers for a comparison of two runs.
pub(super) fn of_comparison(comparison: &Comparison) -> String {
    let table = &comparison.runs[0].1;
    let judged = |point: &Compared| {
        let column = comparison.main_of(point)?;
        let ratio = point.measures.get(&column.name)?.ratio.clone()?;
        Some((column.clone(), point.settings.clone(), ratio))
    };
    let judged: Vec<(Column, Settings, Ratio)> =
        comparison.points.iter().filter_map(judged).collect();
    let mut sentences = Vec::new();
    for column in &table.measures {
        let its = judged
            .iter()
            .filter(|(other, ..)| other.name == column.name);
        let distance = |ratio: &Ratio| ratio.median.ln().abs();
        let most = its
            .clone()
            .max_by(|a, b| distance(&a.2).total_cmp(&distance(&b.2)));
        let Some((_, settings, ratio)) = most else {
            continue;
        };
        let counts = counts(its.map(|(_, _, ratio)| ratio), column);
        let at = match settings.is_empty() {
            true => String::new(),
            false => format!(
                " with {}",
                clipped(&words::settings(settings), LONGEST_WORD)
            ),
        };
        sentences.push(format!(
            "B against A by {}: {counts}; the largest change is {}{at}.",
            clipped(&column.name, LONGEST_WORD),
            words::marked(ratio)
        ));
    }
    sentences.truncate(MOST_MEASURES);
    match sentences.is_empty() {
        true => "The runs have no point and measure in common that can be better or worse.".into(),
        false => sentences.join(" "),
    }
}
