//! Lookups in the tables of an image.

use fathom_run::evidence::Evidence;

use crate::figures::{KEPT, load_in_flight, percent, possible, ratio};
use crate::layers::TABLES;
use crate::rule::Finding;
use crate::slices::{Kind, slices};

/// Minimum share of a request's time: more than all other layers together.
const MOST: f64 = 0.50;

/// Holds if the load keeps its requests in flight, and they wait for lookups in the tables:
///
/// ```text
/// layer `fathom: map` / load mean [ns / ns] >= 0.5
/// in flight / offered                       >= 0.5   [requests]
/// ```
///
/// A load that is known only from its disk offers one request.
pub fn missed(evidence: &Evidence) -> Option<Finding> {
    let slices = slices(evidence);
    let is_tables = |kind: &Kind| matches!(kind, Kind::Layer(name) if name == TABLES);
    let tables = slices.iter().find(|slice| is_tables(&slice.kind))?;
    let text = format!(
        "tables of the image: {} of the request's time (--metadata-cache)",
        percent(tables.share)
    );
    let kept = ratio(load_in_flight(evidence)?, possible(&evidence.load)?)?;
    let finding = match kept >= KEPT {
        true => Finding::verdict(text),
        false => Finding::weak(text),
    };
    (tables.share >= MOST).then_some(finding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Layer;

    fn looked_up(us: f64) -> Evidence {
        with(cell(1, 400.0), |evidence| {
            evidence.layers.push(Layer {
                name: TABLES.into(),
                mean_ns: us * 1e3,
            });
        })
    }

    #[test]
    fn lookups_that_take_most_of_the_time_are_named() {
        let finding = missed(&looked_up(240.0)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "tables of the image: 60% of the request's time (--metadata-cache)"
        );
        assert!(missed(&looked_up(199.0)).is_none());
        assert!(missed(&cell(1, 400.0)).is_none());
        let few = with(looked_up(240.0), |evidence| evidence.load.requests /= 3);
        assert!(!missed(&few).unwrap().holds());
    }
}
