//! Effects of a parameter's values on the main measure, in sentences: `NFS (/mnt) makes this 3.1
//! times slower than ext4 (/srv)`. Only for parameters whose values have words in the cells.

use fathom_run::Better;

use super::points::Settings;
use super::statistics::Ratio;
use super::table::{Point, Table};
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
    let mut lines = vec![format!(
        "By {}: each value next to the first of its parameter, all others being equal.",
        main.name
    )];
    for axis in &table.axes {
        for (i, point) in points.iter().enumerate() {
            let others = without(&point.settings, axis);
            let mut before = points[..i].iter();
            let Some(base) = before.find(|base| without(&base.settings, axis) == others) else {
                continue;
            };
            lines.extend(sentence(
                point,
                base,
                axis,
                &others,
                (&main.name, main.better),
            ));
        }
    }
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

/// Returns a sentence such as
/// `where=host: NFS (/mnt) makes this 3.1 times slower than ext4 (/srv) (0.32x)`.
fn sentence(
    point: &Point,
    base: &Point,
    axis: &str,
    others: &Settings,
    (main, better): (&str, Better),
) -> Option<String> {
    let word = point.words.get(axis)?;
    let (of, to) = (point.measures.get(main)?, base.measures.get(main)?);
    let ratio = Ratio::paired(&of.rounds, &to.rounds)?;
    let effect = effect(&ratio, better)?;
    let context = match others.is_empty() {
        true => String::new(),
        false => format!("{}: ", words::settings(others)),
    };
    let than = match base.words.get(axis) {
        Some(base) => format!(" {} {base}", effect.next_to),
        None => String::new(),
    };
    let mut figures = words::marked(&ratio);
    if ratio.interval.is_some() {
        figures = format!("{figures}, {}", words::ratio_interval(ratio.interval));
    }
    Some(format!(
        "{context}{word} makes {}{than} ({figures}).",
        effect.what
    ))
}

struct Effect {
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
        what,
        next_to: "than",
    };
    let (factor, word) = match speed < 1.0 {
        true => (1.0 / speed, "slower"),
        false => (speed, "faster"),
    };
    let percent = (speed - 1.0).abs() * 100.0;
    Some(match ratio.within_noise {
        Some(true) => Effect {
            what: "no difference that stands out from noise".into(),
            next_to: "next to",
        },
        _ if percent < NOTHING => Effect {
            what: "no difference".into(),
            next_to: "next to",
        },
        _ if factor >= 10.0 => than(format!("this {factor:.0} times {word}")),
        _ if factor >= TIMES => than(format!("this {factor:.1} times {word}")),
        _ => than(format!("this {percent:.0}% {word}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(median: f64, within_noise: Option<bool>, better: Better) -> Option<String> {
        let ratio = Ratio {
            median,
            interval: within_noise.map(|_| (median * 0.9, median * 1.1)),
            within_noise,
        };
        effect(&ratio, better).map(|effect| effect.what)
    }

    #[test]
    fn factors_are_told_as_people_say_them() {
        let told = |median, better| said(median, None, better).unwrap();
        assert_eq!(told(0.32, Better::Higher), "this 3.1 times slower");
        assert_eq!(told(11.2, Better::Higher), "this 11 times faster");
        assert_eq!(told(0.92, Better::Higher), "this 8% slower");
        assert_eq!(told(1.5, Better::Higher), "this 50% faster");
        // Twice the latency is half the speed.
        assert_eq!(told(2.0, Better::Lower), "this 2.0 times slower");
        assert_eq!(told(1.001, Better::Higher), "no difference");
        let noise = said(0.9, Some(true), Better::Higher).unwrap();
        assert!(noise.contains("noise"), "{noise}");
        assert_eq!(
            said(0.9, Some(false), Better::Higher).unwrap(),
            "this 10% slower"
        );
        for nothing in [0.0, f64::INFINITY, f64::NAN] {
            assert_eq!(said(nothing, None, Better::Higher), None);
        }
        assert_eq!(said(0.5, None, Better::Neither), None);
    }
}
