//! Effects of a parameter's values on the main measure, in sentences: `NFS (/mnt) makes this 3.1
//! times slower than ext4 (/srv)`. Only for parameters whose values have words in the cells.

use fathom_run::Better;

use super::points::Settings;
use super::table::{Point, Table};
use super::verdict::{Ratio, Unjudged, Verdict, judge};
use super::words;
use crate::render::text::plural;

/// Maximum number of points that are compared with the points before them.
const MOST_POINTS: usize = 300;
const MOST_LINES: usize = 60;
/// Least factor that is written as a multiple; smaller ones are percentages.
const TIMES: f64 = 2.0;
/// Percentage below which there is no difference.
const NOTHING: f64 = 0.5;

/// Returns a heading, then a sentence for each value of such a parameter but the first, with all
/// other parameters equal. Returns no lines if there are no sentences.
pub(super) fn sentences(table: &Table) -> Vec<String> {
    let Some(main) = table.main() else {
        return Vec::new();
    };
    let points = &table.points[..table.points.len().min(MOST_POINTS)];
    let (mut pairs, mut family) = (Vec::new(), Vec::new());
    for axis in &table.axes {
        for (i, point) in points.iter().enumerate() {
            let others = without(&point.settings, axis);
            let mut before = points[..i].iter();
            let Some(base) = before.find(|base| without(&base.settings, axis) == others) else {
                continue;
            };
            let pair = Pair {
                point,
                base,
                axis,
                others,
            };
            if let Some(compared) = pair.compare(&main.name) {
                pairs.push(pair);
                family.push(compared);
            }
        }
    }
    let ratios = judge(family, main.better);
    let mut lines = vec![format!(
        "By {}: each value next to the first of its parameter, all others being equal.",
        main.name
    )];
    let sentences = pairs.iter().zip(&ratios);
    lines.extend(sentences.filter_map(|(pair, ratio)| pair.sentence(ratio, main.better)));
    let more = (lines.len() - 1).saturating_sub(MOST_LINES);
    lines.truncate(1 + MOST_LINES);
    match (lines.len(), more) {
        (1, _) => lines.clear(),
        (_, 0) => {}
        _ => lines.push(format!(
            "And {}, which the table shows.",
            plural(more as u64, "more")
        )),
    }
    lines
}

fn without(settings: &Settings, axis: &str) -> Settings {
    let others = settings.iter().filter(|(name, _)| *name != axis);
    others
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// A point and the point before it with the first value of the axis, all others being equal.
struct Pair<'a> {
    point: &'a Point,
    base: &'a Point,
    axis: &'a str,
    others: Settings,
}

impl Pair<'_> {
    /// Compares the main measures. Returns `None` for a value without words.
    fn compare(&self, main: &str) -> Option<Unjudged> {
        self.point.words.get(self.axis)?;
        let measures = [self.point, self.base].map(|point| point.measures.get(main));
        let [of, to] = measures;
        Unjudged::paired(&of?.rounds, &to?.rounds)
    }

    /// Returns a sentence such as
    /// `where=host: NFS (/mnt) makes this 3.1 times slower than ext4 (/srv) (0.32x)`.
    fn sentence(&self, ratio: &Ratio, better: Better) -> Option<String> {
        let word = self.point.words.get(self.axis)?;
        let effect = effect(ratio, better)?;
        let context = match self.others.is_empty() {
            true => String::new(),
            false => format!("{}: ", words::settings(&self.others)),
        };
        let than = match self.base.words.get(self.axis) {
            Some(base) => format!(" {} {base}", effect.next_to),
            None => String::new(),
        };
        let mut figures = words::marked(ratio);
        if ratio.interval.is_some() {
            figures = format!("{figures}, {}", words::ratio_interval(ratio.interval));
        }
        Some(format!(
            "{context}{word} {}{than} ({figures}).",
            effect.what
        ))
    }
}

struct Effect {
    /// The words behind the value.
    what: String,
    /// The words before the base of the comparison.
    next_to: &'static str,
}

/// Returns the effect on speed; `None` if the ratio has no meaning for speed.
fn effect(ratio: &Ratio, better: Better) -> Option<Effect> {
    let speed = match better {
        Better::Higher => ratio.median,
        Better::Lower => 1.0 / ratio.median,
        Better::Neither => return None,
    };
    if !speed.is_finite() || speed <= 0.0 {
        return None;
    }
    let than = |what: String| Effect {
        what: format!("makes this {what}"),
        next_to: "than",
    };
    let next_to = |what: String| Effect {
        what,
        next_to: "next to",
    };
    let (factor, word) = match speed < 1.0 {
        true => (1.0 / speed, "slower"),
        false => (speed, "faster"),
    };
    let percent = (speed - 1.0).abs() * 100.0;
    Some(match ratio.verdict {
        Verdict::NotEnoughRounds { more } => next_to(format!(
            "needs {} for a verdict",
            plural(more.into(), "more round")
        )),
        Verdict::NoDifferenceShown => next_to("makes no difference that the rounds show".into()),
        _ if percent < NOTHING => next_to("makes no difference that matters".into()),
        _ if factor >= 10.0 => than(format!("{factor:.0} times {word}")),
        _ if factor >= TIMES => than(format!("{factor:.1} times {word}")),
        _ => than(format!("{percent:.0}% {word}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(median: f64, verdict: Verdict, better: Better) -> Option<String> {
        effect(&Ratio::told(median, verdict), better).map(|effect| effect.what)
    }

    #[test]
    fn factors_are_told_as_people_say_them() {
        let told = |median, better| said(median, Verdict::Worse, better).unwrap();
        assert_eq!(told(0.32, Better::Higher), "makes this 3.1 times slower");
        assert_eq!(told(11.2, Better::Higher), "makes this 11 times faster");
        assert_eq!(told(0.92, Better::Higher), "makes this 8% slower");
        assert_eq!(told(1.5, Better::Higher), "makes this 50% faster");
        // Twice the latency is half the speed.
        assert_eq!(told(2.0, Better::Lower), "makes this 2.0 times slower");
        assert!(told(1.001, Better::Higher).starts_with("makes no difference"));
        for nothing in [0.0, f64::INFINITY, f64::NAN] {
            assert_eq!(said(nothing, Verdict::Worse, Better::Higher), None);
        }
        assert_eq!(said(0.5, Verdict::Worse, Better::Neither), None);
    }

    #[test]
    fn no_factor_is_told_without_a_verdict() {
        for verdict in [
            Verdict::NoDifferenceShown,
            Verdict::NotEnoughRounds { more: 5 },
        ] {
            let told = said(0.32, verdict, Better::Higher).unwrap();
            assert!(!told.contains("slower"), "{told}");
        }
        let few = said(0.32, Verdict::NotEnoughRounds { more: 5 }, Better::Higher);
        assert_eq!(few.unwrap(), "needs 5 more rounds for a verdict");
    }
}
