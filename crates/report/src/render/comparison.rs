//! Compares several runs: the first is the base, the others show their differences to it.

use super::facts;
use super::text::micros;
use crate::analysis::{Analysis, Distribution, Layer, LayerRow};

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
