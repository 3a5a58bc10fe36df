//! Compares several runs: the first is the base, the others show their differences to it.

use super::facts;
use super::text::micros;
use super::verdict::Duration;
use crate::analysis::{Analysis, Distribution, Exact, Layer, LayerRow};

/// A run, with the user's name for it.
type Named = (String, Analysis);

/// Returns the letters of a run in a comparison: A to Z, then AA.
pub(super) fn letter(run: usize) -> String {
    let last = char::from(b'A' + (run % 26) as u8);
    match run / 26 {
        0 => last.to_string(),
        before => format!("{}{last}", letter(before - 1)),
    }
}

/// Maximum number of runs that the answer compares with the first.
const MOST_ANSWERED: usize = 4;

/// Returns the answer of a comparison: how much longer a request of each run takes than one of the
/// first, and the layer that makes most of the difference.
pub(super) fn answer(runs: &[Named], duration: Duration) -> String {
    let Some(base) = runs.first().and_then(|(_, run)| exact(run)) else {
        return "Nothing to compare: no request of run A could be followed.".into();
    };
    let others = runs.iter().enumerate().skip(1).take(MOST_ANSWERED);
    let told = others.map(|(i, (_, run))| match exact(run) {
        Some(exact) => against(&letter(i), exact, base, duration),
        None => format!("no request of {} could be followed", letter(i)),
    });
    let more = runs.len().saturating_sub(1 + MOST_ANSWERED);
    let more = (more > 0).then(|| format!("the tables have {more} more"));
    let told: Vec<String> = told.chain(more).collect();
    let whole = duration(base.total.mean);
    match told.is_empty() {
        true => format!("A request of A takes {whole}; there is no run to compare it with."),
        false => format!("A request of A takes {whole}: {}.", told.join("; ")),
    }
}

/// Returns the requests that were followed.
fn exact(run: &Analysis) -> Option<&Exact> {
    run.exact.as_ref().filter(|exact| exact.total.count > 0)
}

/// Returns words such as `B takes 30.00 us (32%) longer, most of it in 'host: device' (+38.15 us)`.
fn against(letter: &str, exact: &Exact, base: &Exact, duration: Duration) -> String {
    let more = exact.total.mean - base.total.mean;
    let share = more.abs() / base.total.mean.max(1.0) * 100.0;
    if share < 0.5 {
        return format!("{letter} takes as long");
    }
    let word = if more > 0.0 { "longer" } else { "less" };
    let by = duration(more.abs());
    let mean = |of: &Exact, layer| {
        let row = of.layers.iter().find(|row| row.layer == layer);
        row.map_or(0.0, |row| row.time.mean)
    };
    let layers = Layer::ALL.iter().copied();
    let changes = layers.map(|layer| (layer, mean(exact, layer) - mean(base, layer)));
    // The layer that contributes most in the direction of the change.
    let most = changes.max_by(|a, b| (a.1 * more.signum()).total_cmp(&(b.1 * more.signum())));
    let most = most
        .filter(|(_, change)| change * more > 0.0)
        .map(|(layer, change)| {
            let sign = if change > 0.0 { "+" } else { "-" };
            let part = match change.abs() * 2.0 >= more.abs() {
                true => "most of it",
                false => "the largest part of it",
            };
            let gap = exact.is_gap(layer) || base.is_gap(layer);
            format!(
                ", {part} in '{}' ({sign}{})",
                layer.name(gap),
                duration(change.abs())
            )
        });
    format!(
        "{letter} takes {by} ({share:.0}%) {word}{}",
        most.unwrap_or_default()
    )
}

/// Returns the facts of the environment that differ between runs: a name, and a text for each run.
pub(super) fn differences(runs: &[Named]) -> Vec<(&'static str, Vec<String>)> {
    let facts = runs.iter().map(|(_, run)| facts::environment(run));
    differing(&facts.collect::<Vec<_>>())
}

/// Returns the facts that differ, given each run's names and texts; a missing fact is `-`.
pub(crate) fn differing<N: Clone + PartialEq>(facts: &[Vec<(N, String)>]) -> Vec<(N, Vec<String>)> {
    let mut names: Vec<N> = Vec::new();
    for (name, _) in facts.iter().flatten() {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    let of = |name: &N| -> Vec<String> {
        let found = facts.iter().map(|rows| {
            let row = rows.iter().find(|row| row.0 == *name);
            row.map_or("-".to_owned(), |row| row.1.clone())
        });
        found.collect()
    };
    let all = names.into_iter().map(|name| {
        let values = of(&name);
        (name, values)
    });
    all.filter(|(_, values)| values.windows(2).any(|pair| pair[0] != pair[1]))
        .collect()
}

/// Returns the layers that any of the runs has, in the order of a request's path.
pub(super) fn present<'a>(runs: impl Iterator<Item = &'a Analysis> + Clone) -> Vec<Layer> {
    let all = Layer::ALL.iter().copied();
    all.filter(|&layer| runs.clone().any(|run| row(run, layer).is_some()))
        .collect()
}

/// Returns a run's column: its layers, then the total. A layer that the run lacks is None.
pub(super) fn column(
    run: &Analysis,
    layers: &[Layer],
    of: fn(&Distribution) -> Option<f64>,
) -> Vec<Option<f64>> {
    let values = layers.iter().map(|&layer| of(&row(run, layer)?.time));
    let total = run.exact.as_ref().and_then(|exact| of(&exact.total));
    values.chain([total]).collect()
}

fn row(run: &Analysis, layer: Layer) -> Option<&LayerRow> {
    let layers = &run.exact.as_ref()?.layers;
    layers.iter().find(|row| row.layer == layer)
}

/// Returns the differences to the base: in us, then in percent of the base.
pub(super) fn difference(base: &[Option<f64>], values: &[Option<f64>]) -> [Vec<String>; 2] {
    let pairs = || base.iter().zip(values);
    let differences: Vec<Option<f64>> = pairs().map(|(a, b)| Some((*b)? - (*a)?)).collect();
    let signed = micros(&differences).into_iter().zip(&differences);
    let signed = signed.map(|(text, value)| match value {
        Some(value) if *value > 0.0 => format!("+{text}"),
        _ => text,
    });
    let percents = pairs().map(|pair| match pair {
        (Some(a), Some(b)) if *a > 0.0 => format!("{:+.0}%", (b - a) / a * 100.0),
        _ => String::new(),
    });
    [signed.collect(), percents.collect()]
}

#[cfg(test)]
mod tests {
    #[test]
    fn runs_have_letters_as_columns_of_a_sheet_have() {
        let told: Vec<String> = [0, 25, 26, 51, 52, 701, 702].map(super::letter).to_vec();
        assert_eq!(told, ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]);
    }
}
