//! Experiments on a terminal: [`report`] for one run, [`compare`] for two. No line is wider than
//! 100 columns.

mod bars;
mod bonnie;

use std::collections::BTreeMap;

use fathom_run::{Better, Unit};

use super::answer;
use super::beside::Sides;
use super::cell::{Column, clipped};
use super::compare::{Compared, Comparison};
use super::layers;
use super::path;
use super::points::Settings;
use super::profile;
use super::sheet;
use super::spread;
use super::table::{Figure, Point, Table};
use super::time_line;
use super::verdict::Ratio;
use super::words::{self, MOST_ROWS, Scale};
use super::{bonnie as layout, effects};
use crate::analysis::Analysis;
use crate::render::facts;
use crate::render::terminal::page::Page;
use crate::render::terminal::{Style, report_and};
use crate::render::text::{self, WIDTH, plural};

/// Maximum width of the settings in each row, in characters. Wider settings become a list.
const MOST_SETTINGS: usize = 44;
/// Maximum number of characters of a ranked setting.
const MOST_EFFECT: usize = 42;
/// Maximum number of characters of a column's heading.
const MOST_HEADING: usize = 40;

const ALL: &str = "--html, --json and --csv have all that was measured.";

/// Renders everything about an experiment's run as text.
pub fn report(table: &Table, style: Style) -> String {
    let answer = answer::of(table);
    let advice = answer.advice.map(str::to_owned).into_iter();
    let said = advice.chain(answer.more);
    let mut parts = Page::report(style, &answer.sentence, said, &table.title);
    warnings(&mut parts.answer, "", table);
    let picture = &mut parts.picture;
    bars::show(picture, table);
    layers::terminal::show(picture, table);
    rankings(picture, table);
    show_effects(picture, table);
    knees(picture, table);
    verdicts(picture, table);
    profile::terminal::show(picture, table);
    time_line::terminal::show(picture, table);
    path::terminal::show(picture, table);
    tables(&mut parts.table, table);
    let environment = &mut parts.environment;
    environment.heading("Environment");
    for (name, words) in words::facts(table) {
        environment.fact(name, &words);
    }
    problems(environment, &table.problems);
    parts.finish().finish()
}

/// Warns of what makes all figures of a run doubtful; `letter` names one of several runs.
fn warnings(page: &mut Page, letter: &str, table: &Table) {
    let doubt = facts::doubt(&table.environment).map(str::to_owned);
    for line in doubt.into_iter().chain(words::missing(table)) {
        page.warning(&format!("{letter}{line}"));
    }
}

fn tables(page: &mut Page, table: &Table) {
    bonnie::show(page, table);
    match (Sides::of(table), sheet::of(table)) {
        (Some(sides), _) => beside(page, &sides),
        (None, Some(sheet)) => {
            page.heading("Attributes");
            let rows: Vec<&Settings> = sheet.rows.iter().collect();
            let groups = sheet.columns.into_iter().map(|column| vec![column]);
            grid(page, &rows, groups.collect());
            page.note(sheet::EXPLAINED);
            page.note(ALL);
        }
        (None, None) => points(page, table),
    }
    show_spread(page, table);
    if let Some(line) = words::breakdowns(table) {
        page.heading("Breakdowns");
        page.note(&line);
    }
}

fn show_effects(page: &mut Page, table: &Table) {
    let sentences = effects::sentences(table);
    if !sentences.is_empty() {
        page.heading("Effects");
    }
    sentences.iter().for_each(|line| page.note(line));
}

fn show_spread(page: &mut Page, table: &Table) {
    let Some((main, rows)) = spread::of(table) else {
        return;
    };
    page.heading(&format!("{} over rounds", main.name));
    let settings: Vec<&Settings> = rows
        .iter()
        .map(|(at, _)| &table.points[*at].settings)
        .collect();
    let column = |(number, heading): (usize, &&str)| {
        let texts = rows.iter().map(|(_, row)| row[number].clone());
        ((*heading).to_owned(), texts.collect())
    };
    let group: Group = spread::HEADINGS.iter().enumerate().map(column).collect();
    grid(page, &settings, vec![group]);
    page.note(spread::EXPLAINED);
}

/// Renders an experiment's only cell, whose requests were followed through all layers, with its
/// suspected limiter.
pub fn breakdown(cell: &Analysis, table: &Table, style: Style) -> String {
    report_and(cell, answer::suspect(table).as_ref(), style)
}

/// Renders two runs of an experiment, point by point.
pub fn compare(comparison: &Comparison, style: Style) -> String {
    let answer = answer::of_comparison(comparison);
    let mut parts = Page::report(style, &answer, None, "Runs of an experiment compared");
    for (letter, (name, table)) in ["A", "B"].into_iter().zip(&comparison.runs) {
        parts
            .answer
            .fact(letter, &format!("{name}: {}", table.title));
        warnings(&mut parts.answer, &format!("{letter}: "), table);
    }
    let verdicts = comparison.verdicts();
    if !verdicts.is_empty() {
        parts.picture.heading("Changes");
    }
    verdicts.iter().for_each(|line| parts.picture.note(line));
    let page = &mut parts.table;
    page.heading("Points of both");
    let shown = &comparison.points[..comparison.points.len().min(MOST_ROWS)];
    let rows: Vec<&Settings> = shown.iter().map(|point| &point.settings).collect();
    let groups = comparison
        .measures
        .iter()
        .flat_map(|column| pairs(column, shown));
    let mut groups: Vec<Group> = groups.collect();
    match rows.as_slice() {
        // A single point is a list, in which the heading of a column has its run.
        [only] if only.is_empty() => {
            for (heading, _) in groups.iter_mut().filter_map(|group| group.first_mut()) {
                heading.truncate(heading.len() - " A".len());
            }
            list(page, &groups, "A");
        }
        _ => grid(page, &rows, groups),
    }
    for line in comparison.explained() {
        page.note(&line);
    }
    let page = &mut parts.environment;
    if !comparison.differences.is_empty() {
        page.heading("Differences of the environment");
    }
    for difference in &comparison.differences {
        page.fact(
            &clipped(&difference.name, 30),
            &format!("A: {}", difference.values[0]),
        );
        page.fact("", &format!("B: {}", difference.values[1]));
    }
    let sides = ["A", "B"].into_iter().zip(&comparison.runs);
    let all = sides.flat_map(|(letter, (_, table))| {
        let lines = table.problems.iter();
        lines.map(move |line| format!("{letter}: {line}"))
    });
    problems(page, &all.collect::<Vec<String>>());
    parts.finish().finish()
}

/// Columns that belong together, each with a heading and a text for each row.
type Group = Vec<(String, Vec<String>)>;

/// Shows the points in the experiment's own layout.
fn beside(page: &mut Page, sides: &Sides) {
    for pair in sides.pairs() {
        page.heading(&clipped(&pair.names.join(", "), WIDTH - 2));
        let groups = match pair.rows.as_slice() {
            // A line for each column.
            [only] if only.is_empty() => pair
                .columns
                .into_iter()
                .flatten()
                .map(|one| vec![one])
                .collect(),
            _ => pair.columns,
        };
        grid(page, &pair.rows, groups);
    }
    for line in sides.explained() {
        page.note(&line);
    }
    page.note(ALL);
}

fn points(page: &mut Page, table: &Table) {
    let shown = &table.points[..table.points.len().min(MOST_ROWS)];
    let rows: Vec<&Settings> = shown.iter().map(|point| &point.settings).collect();
    let mut groups: Vec<Group> = Vec::new();
    if shown.iter().any(|point| point.done != point.planned) {
        let done = shown
            .iter()
            .map(|point| format!("{} of {}", point.done, point.planned));
        groups.push(vec![("cells".into(), done.collect())]);
    }
    for column in { table.measures.iter() }.filter(|column| !layout::has(&column.name)) {
        groups.push(figures(column, shown));
        if Some(&column.name) == table.main.as_ref() {
            groups.extend(vs_bare(shown));
        }
    }
    if groups.is_empty() && layout::is_shown(table) {
        return; // bonnie++'s table has all
    }
    page.heading("Points");
    grid(page, &rows, groups);
    for line in words::explained(table) {
        page.note(&line);
    }
    if shown.len() < table.points.len() {
        let more = plural((table.points.len() - shown.len()) as u64, "more point");
        page.note(&format!("and {more}: --json and --csv have all."));
    }
}

/// Returns a measure's columns: its medians and, if it can be better or worse, intervals and
/// ratios.
fn figures(column: &Column, points: &[Point]) -> Group {
    let of: Vec<Option<&Figure>> = points
        .iter()
        .map(|point| point.measures.get(&column.name))
        .collect();
    let scale = scale(column.unit, &of);
    let mut group = vec![(
        clipped(&scale.heading(&column.name), MOST_HEADING),
        each(&of, |figure| scale.write(figure.median)),
    )];
    if column.better == Better::Neither {
        return group;
    }
    push_unless_empty(
        &mut group,
        "interval",
        each(&of, |figure| scale.interval(figure.interval)),
    );
    let ratios: Vec<Option<&Ratio>> = of.iter().map(|figure| (*figure)?.ratio.as_ref()).collect();
    push_ratios(&mut group, "ratio", &ratios);
    group
}

fn vs_bare(points: &[Point]) -> Option<Group> {
    let of: Vec<Option<&Figure>> = points.iter().map(|point| point.vs_bare.as_ref()).collect();
    of.iter().flatten().next()?;
    let mut group = vec![(
        "vs bare".into(),
        each(&of, |figure| words::ratio(figure.median)),
    )];
    let intervals = each(&of, |figure| words::ratio_interval(figure.interval));
    push_unless_empty(&mut group, "interval", intervals);
    Some(group)
}

/// Returns a measure's columns in a comparison.
fn pairs(column: &Column, points: &[Compared]) -> Option<Group> {
    let of = || points.iter().map(|point| point.measures.get(&column.name));
    let a: Vec<Option<&Figure>> = of().map(|pair| Some(&pair?.a)).collect();
    let b: Vec<Option<&Figure>> = of().map(|pair| Some(&pair?.b)).collect();
    a.iter().flatten().next()?;
    let both: Vec<Option<&Figure>> = a.iter().chain(&b).copied().collect();
    let scale = scale(column.unit, &both);
    let write = |figure: &Figure| scale.write(figure.median);
    let name = clipped(&scale.heading(&column.name), MOST_HEADING);
    let mut group = vec![
        (format!("{name} A"), each(&a, write)),
        ("B".into(), each(&b, write)),
    ];
    let ratios: Vec<Option<&Ratio>> = of().map(|pair| pair?.ratio.as_ref()).collect();
    push_ratios(&mut group, "B/A", &ratios);
    Some(group)
}

fn scale(unit: Unit, figures: &[Option<&Figure>]) -> Scale {
    Scale::of(unit, figures.iter().flatten().map(|figure| figure.median))
}

fn each<T>(of: &[Option<&T>], write: impl Fn(&T) -> String) -> Vec<String> {
    let cell = |value: &Option<&T>| value.map_or("-".to_owned(), &write);
    of.iter().map(cell).collect()
}

fn push_unless_empty(group: &mut Group, heading: &str, texts: Vec<String>) {
    if texts.iter().any(|text| !matches!(text.as_str(), "" | "-")) {
        group.push((heading.to_owned(), texts));
    }
}

fn push_ratios(group: &mut Group, heading: &str, ratios: &[Option<&Ratio>]) {
    let blank = |texts: Vec<String>| -> Vec<String> {
        let blank = |text: String| if text == "-" { String::new() } else { text };
        texts.into_iter().map(blank).collect()
    };
    push_unless_empty(group, heading, blank(each(ratios, words::marked)));
    let intervals = each(ratios, |ratio| words::ratio_interval(ratio.interval));
    push_unless_empty(group, "interval", blank(intervals));
}

/// Shows rows of settings with groups of columns, as several tables if they are too wide.
fn grid(page: &mut Page, rows: &[&Settings], groups: Vec<Group>) {
    match rows {
        [] => return page.note("No points."),
        [only] if only.is_empty() => return list(page, &groups, "value"),
        _ => {}
    }
    let labels = labels(page, rows);
    let width_of = |(heading, texts): &(String, Vec<String>)| {
        let texts = texts.iter().chain([heading]);
        texts.map(|text| text.chars().count()).max().unwrap_or(0) + 2
    };
    let labelled: usize = 2 + labels.iter().map(width_of).sum::<usize>();
    // Split a group that is wider than a line.
    let fits = |group: &Group| labelled + group.iter().map(width_of).sum::<usize>() <= WIDTH + 2;
    let groups = groups.into_iter().flat_map(|group| match fits(&group) {
        true => vec![group],
        false => group.into_iter().map(|column| vec![column]).collect(),
    });
    let (mut part, mut width): (Group, usize) = (Vec::new(), labelled);
    let mut parts = Vec::new();
    for group in groups {
        let wide: usize = group.iter().map(width_of).sum();
        // The last column has no gap behind it.
        if !part.is_empty() && width + wide > WIDTH + 2 {
            parts.push(std::mem::take(&mut part));
            width = labelled;
        }
        width += wide;
        part.extend(group);
    }
    parts.push(part);
    for (i, part) in parts.into_iter().enumerate() {
        if i > 0 {
            page.gap();
        }
        let mut table = text::Table::new(labels.len(), &[]);
        let mut columns = Vec::new();
        for (heading, texts) in labels.iter().cloned().chain(part) {
            table.add_column(heading);
            columns.push(texts);
        }
        table.columns(&columns);
        page.table(&table);
    }
}

/// Shows the groups of a single row, a line each. `first` is the heading of their first columns.
fn list(page: &mut Page, groups: &[Group], first: &str) {
    let mut table = text::Table::new(1, &["measure", first]);
    let longest = groups.iter().max_by_key(|group| group.len());
    for (heading, _) in longest.into_iter().flatten().skip(1) {
        table.add_column(heading);
    }
    for group in groups {
        let name = group.first().map(|(heading, _)| heading.clone());
        let values = group.iter().filter_map(|(_, texts)| texts.first().cloned());
        table.row(name.into_iter().chain(values));
    }
    page.table(&table);
}

/// Returns the columns that identify the rows: one for each setting, or numbers if these are too
/// wide.
fn labels(page: &mut Page, rows: &[&Settings]) -> Group {
    let mut columns: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for name in rows.iter().flat_map(|row| row.keys()) {
        columns.entry(name).or_default();
    }
    for (name, texts) in &mut columns {
        let value = |row: &&Settings| row.get(*name).map_or("-".to_owned(), Clone::clone);
        texts.extend(rows.iter().map(value));
    }
    let widest = |(name, texts): (&&str, &Vec<String>)| {
        let widths = texts.iter().map(|text| text.chars().count());
        widths.max().unwrap_or(0).max(name.chars().count()) + 2
    };
    if columns.is_empty() {
        return vec![(
            "".into(),
            rows.iter().map(|row| words::label(row)).collect(),
        )];
    }
    if columns.iter().map(widest).sum::<usize>() <= MOST_SETTINGS {
        let columns = columns.into_iter();
        return columns
            .map(|(name, texts)| (name.to_owned(), texts))
            .collect();
    }
    for (number, row) in rows.iter().enumerate() {
        page.fact(&format!("#{}", number + 1), &words::label(row));
    }
    page.gap();
    let numbers = (1..=rows.len()).map(|number| format!("#{number}"));
    vec![("".into(), numbers.collect())]
}

fn rankings(page: &mut Page, table: &Table) {
    if table.rankings.is_empty() {
        return;
    }
    page.heading("Which settings matter");
    for (i, ranking) in table.rankings.iter().enumerate() {
        if i > 0 {
            page.gap();
        }
        let measure = clipped(&ranking.measure, MOST_HEADING);
        let mut rows = text::Table::new(2, &[&measure, "", "ratio", "interval"]);
        for effect in ranking.effects.iter().take(MOST_ROWS) {
            rows.row([
                clipped(&effect.label(), MOST_EFFECT),
                words::meaning(effect.ratio.verdict),
                words::marked(&effect.ratio),
                words::ratio_interval(effect.ratio.interval),
            ]);
        }
        page.table(&rows);
    }
    if let Some(line) = words::rankings_explained(table) {
        page.note(&line);
    }
}

fn knees(page: &mut Page, table: &Table) {
    if !table.knees.is_empty() {
        page.heading("Knees");
    }
    words::knees(table).for_each(|line| page.note(&line));
}

fn verdicts(page: &mut Page, table: &Table) {
    let judged: Vec<_> = words::judged(table).collect();
    if !judged.is_empty() {
        page.heading("Suspected limiters");
    }
    judged.iter().for_each(|line| page.note(line));
}

fn problems(page: &mut Page, problems: &[String]) {
    if problems.is_empty() {
        return;
    }
    page.heading("Problems");
    for problem in problems {
        page.warning(problem);
    }
}
