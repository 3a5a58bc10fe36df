//! Sums that cannot be right: figures that contradict each other.

use crate::analysis::{Exact, Wiki};
use crate::render::text::duration;

/// Most by which a figure may exceed the whole that contains it: rows of different rounds differ.
const DIFFERENCE: f64 = 1.10;
/// Most by which the sum of all layers may differ from the total, for rounding.
const ROUNDING: f64 = 0.01;

/// Returns an error for each impossible sum: a part of a request that takes longer than the whole
/// request, and layers that do not add up to the total.
pub(crate) fn sums(exact: Option<&Exact>, wiki: Option<&Wiki>) -> Vec<String> {
    let Some(exact) = exact.filter(|exact| exact.total.count > 0) else {
        return Vec::new();
    };
    let mut errors: Vec<String> = layers(exact).into_iter().collect();
    let rows = wiki.into_iter().flat_map(|wiki| &wiki.cumulative);
    // A benchmark's own mean is not a part of the requests that were followed.
    let parts = rows.filter(|(name, ..)| !name.ends_with(" benchmark"));
    // The benchmark's mean is of the same rounds as the row.
    let whole = |control: Option<f64>| control.unwrap_or(0.0).max(exact.total.mean);
    let with_whole = parts.map(|(name, ns, control)| (name, *ns, whole(*control)));
    let longer = with_whole.filter(|(_, ns, whole)| *ns > whole * DIFFERENCE);
    errors.extend(longer.map(|(name, ns, whole)| {
        format!(
            "Impossible sum: '{name}' takes {} of a request that takes {} in all; the two are of \
             different requests, and must not be compared.",
            duration(ns),
            duration(whole)
        )
    }));
    errors
}

fn layers(exact: &Exact) -> Option<String> {
    let sum: f64 = exact.layers.iter().map(|row| row.time.mean).sum();
    let whole = exact.total.mean;
    let differs = (sum - whole).abs() > whole.abs() * ROUNDING + 1.0;
    differs.then(|| {
        format!(
            "Impossible sum: the layers take {} together, and the whole request {}; the table of \
             layers must not be used.",
            duration(sum),
            duration(whole)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Distribution, Layer, LayerRow};

    /// Requests of 38 us, all of them in one layer.
    fn exact(layer_ns: f64) -> Exact {
        let time = |mean| Distribution {
            count: 1000,
            mean,
            ..Distribution::default()
        };
        let layer = Layer::HostDevice;
        Exact {
            total: time(38_000.0),
            layers: vec![LayerRow {
                layer,
                group: layer.describe().1,
                name: layer.describe().0,
                time: time(layer_ns),
                share: 1.0,
                middle_mean: None,
                tail_mean: None,
                tail_share: None,
                negative: 0,
            }],
            ..Exact::default()
        }
    }

    fn wiki(ns: f64, control: Option<f64>) -> Wiki {
        Wiki {
            cumulative: vec![
                ("Guest benchmark".into(), 90_000.0, None),
                ("Fathom virtio".into(), ns, control),
            ],
            ..Wiki::default()
        }
    }

    #[test]
    fn a_part_above_the_whole_is_an_error() {
        let exact = exact(38_000.0);
        let errors = sums(Some(&exact), Some(&wiki(86_000.0, None)));
        assert_eq!(errors.len(), 1, "{errors:?}");
        for words in ["Impossible sum: 'Fathom virtio'", "86.00 us", "38.00 us"] {
            assert!(errors[0].contains(words), "{errors:?}");
        }
        assert!(sums(Some(&exact), Some(&wiki(37_000.0, None))).is_empty());
        // Rows of other rounds compare with the benchmark's mean in these rounds.
        assert!(sums(Some(&exact), Some(&wiki(86_000.0, Some(90_000.0)))).is_empty());
    }

    #[test]
    fn layers_that_do_not_add_up_are_an_error() {
        let errors = sums(Some(&exact(50_000.0)), None);
        assert!(errors[0].contains("50.00 us together"), "{errors:?}");
        assert!(sums(Some(&exact(37_999.5)), None).is_empty());
        assert!(sums(None, None).is_empty());
    }
}
