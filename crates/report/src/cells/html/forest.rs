//! The effects of settings as a forest plot: a line for each effect's interval, with a mark at its
//! median. The scale is logarithmic: a ratio of one half is as far from 1 as a ratio of two.

use crate::cells::ranking::{Effect, Ranking};
use crate::cells::table::Table;
use crate::cells::verdict::{Ratio, Verdict};
use crate::cells::words;
use crate::render::html::markup::Html;

/// Maximum number of rows that remain readable.
const MOST_ROWS: usize = 200;
/// Limits of the scale; the lines of ratios beyond them end at the edge.
const LEAST: f64 = 1e-4;
const MOST: f64 = 1e4;
/// The smallest range of the scale, then the factor that is left free at each end.
const NARROWEST: (f64, f64) = (0.9, 1.0 / 0.9);
const MARGIN: f64 = 1.05;
/// Minimum distance of ticks, relative to the width; closer labels would overlap.
const BETWEEN_TICKS: f64 = 0.06;

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    if table.rankings.is_empty() {
        return;
    }
    html.heading(prefix, ("ranking", "Ranking"), "Which settings matter");
    if let Some(line) = words::rankings_explained(table) {
        html.note(&line);
    }
    for (number, ranking) in table.rankings.iter().enumerate() {
        show_one(html, &format!("{prefix}forest-{}", number + 1), ranking);
    }
}

fn show_one(html: &mut Html, id: &str, ranking: &Ranking) {
    let shown = &ranking.effects[..ranking.effects.len().min(MOST_ROWS)];
    let scale = Scale::of(shown.iter().map(|effect| &effect.ratio));
    html.raw("<div class=\"chart\">\n");
    html.element("h3", &[], &ranking.measure);
    html.open("div", &[("class", "bars forest"), ("id", id)]);
    for effect in shown {
        let meaning = words::meaning(effect.ratio.verdict);
        html.element("div", &[("class", "label")], &effect.label());
        row(html, &scale, effect);
        html.raw("<div class=\"sum\">");
        html.text(&words::marked(&effect.ratio));
        let interval = words::ratio_interval(effect.ratio.interval);
        html.element("small", &[], &format!("{interval} {meaning}"));
        html.raw("</div>\n");
    }
    html.raw("<div></div>");
    axis(html, &scale);
    html.raw("<div></div>\n</div>\n");
    if shown.len() < ranking.effects.len() {
        let all = ranking.effects.len();
        html.note(&format!("The first {MOST_ROWS} of {all} settings."));
    }
    html.raw("</div>\n");
}

fn row(html: &mut Html, scale: &Scale, effect: &Effect) {
    let class = match effect.ratio.verdict {
        Verdict::Better => "effect better",
        Verdict::Worse => "effect worse",
        Verdict::NoDifferenceShown | Verdict::NotEnoughRounds { .. } => "effect noise",
    };
    html.open("svg", &[("class", class), ("role", "img")]);
    let line = |html: &mut Html, class: &str, from: f64, to: f64, (top, bottom): (&str, &str)| {
        let [from, to] = [from, to].map(|ratio| scale.place(ratio));
        let attributes = [
            ("class", class),
            ("x1", from.as_str()),
            ("x2", &to),
            ("y1", top),
            ("y2", bottom),
        ];
        html.element("line", &attributes, "");
    };
    line(html, "one", 1.0, 1.0, ("0", "100%"));
    if let Some((low, high)) = effect.ratio.interval {
        line(html, "range", low, high, ("50%", "50%"));
        for end in [low, high] {
            line(html, "end", end, end, ("30%", "70%"));
        }
    }
    let at = scale.place(effect.ratio.median);
    html.element("circle", &[("cx", &at), ("cy", "50%"), ("r", "5")], "");
    html.raw("</svg>");
}

/// Draws the ticks and their labels.
fn axis(html: &mut Html, scale: &Scale) {
    html.raw("<svg class=\"ticks\" role=\"img\">");
    for tick in scale.ticks() {
        let at = scale.place(tick);
        html.element(
            "line",
            &[("x1", &at), ("x2", &at), ("y1", "0"), ("y2", "5")],
            "",
        );
        html.element("text", &[("x", &at), ("y", "17")], &words::ratio(tick));
    }
    html.raw("</svg>");
}

/// A logarithmic scale of ratios; both fields are natural logarithms.
struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    fn of<'a>(ratios: impl Iterator<Item = &'a Ratio>) -> Scale {
        let (mut low, mut high) = NARROWEST;
        for ratio in ratios {
            let (from, to) = ratio.interval.unwrap_or((ratio.median, ratio.median));
            low = low.min(from.min(ratio.median) / MARGIN);
            high = high.max(to.max(ratio.median) * MARGIN);
        }
        Scale {
            low: low.max(LEAST).ln(),
            high: high.min(MOST).ln(),
        }
    }

    /// Returns the place of a ratio in percent of the width, such as `12.34%`.
    fn place(&self, ratio: f64) -> String {
        let share = (ratio.ln() - self.low) / (self.high - self.low);
        format!("{:.2}%", share.clamp(0.0, 1.0) * 100.0)
    }

    /// Returns round ratios within the scale.
    fn ticks(&self) -> Vec<f64> {
        const STEPS: [&[f64]; 5] = [
            &[1.0, 1.02, 1.05, 1.1],
            &[1.0, 1.1, 1.2, 1.5, 2.0],
            &[1.0, 1.5, 2.0, 3.0, 5.0],
            &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0],
            &[1.0, 10.0, 100.0, 1e3, 1e4],
        ];
        let within = |steps: &[f64]| -> Vec<f64> {
            let below = steps.iter().skip(1).rev().map(|step| 1.0 / step);
            let all = below.chain(steps.iter().copied());
            all.filter(|tick| (self.low..=self.high).contains(&tick.ln()))
                .collect()
        };
        // The finest readable steps that reach from one end to the other.
        let reach = self.high.max(-self.low);
        let fits = |steps: &&&[f64]| {
            let last = steps.last().copied().unwrap_or(1.0);
            let gaps = steps.windows(2).map(|pair| (pair[1] / pair[0]).ln());
            let least = gaps.fold(f64::INFINITY, f64::min) / (self.high - self.low);
            last * last >= reach.exp() && least >= BETWEEN_TICKS
        };
        let steps = STEPS.iter().find(fits).unwrap_or(&STEPS[4]);
        within(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(ratios: &[(f64, Option<(f64, f64)>)]) -> Scale {
        let ratios = ratios.iter().map(|(median, interval)| Ratio {
            interval: *interval,
            ..Ratio::told(*median, Verdict::NoDifferenceShown)
        });
        Scale::of(ratios.collect::<Vec<_>>().iter())
    }

    #[test]
    fn half_and_twice_are_as_far_from_one() {
        let scale = scale(&[(0.5, None), (1.0, Some((0.4, 2.0)))]);
        let at = |ratio| -> f64 { scale.place(ratio).trim_end_matches('%').parse().unwrap() };
        assert!(((at(1.0) - at(0.5)) - (at(2.0) - at(1.0))).abs() < 0.03);
        assert!(at(0.4) > 0.0 && at(2.0) < 100.0 && at(0.4) < 5.0 && at(2.0) > 95.0);
        assert_eq!(scale.ticks(), [0.5, 1.0 / 1.5, 1.0, 1.5, 2.0]);
    }

    #[test]
    fn small_and_huge_effects_have_ticks_that_can_be_read() {
        let ticks = |low: f64, high: f64| scale(&[(1.0, Some((low, high)))]).ticks();
        assert_eq!(
            ticks(0.99, 1.01),
            [1.0 / 1.1, 1.0 / 1.05, 1.0 / 1.02, 1.0, 1.02, 1.05, 1.1]
        );
        for (low, high) in [
            (0.3, 1.1),
            (0.01, 40.0),
            (1e-9, 1e9),
            (0.0, 1.0),
            (1e-300, f64::MAX),
        ] {
            let ticks = ticks(low, high);
            assert!((2..=15).contains(&ticks.len()), "{low} {high}: {ticks:?}");
            assert!(ticks.contains(&1.0) && ticks.is_sorted(), "{ticks:?}");
        }
    }

    #[test]
    fn what_is_off_the_scale_is_at_its_edge() {
        let scale = scale(&[(0.0, None), (f64::MAX, None)]);
        assert_eq!(scale.place(0.0), "0.00%");
        assert_eq!(scale.place(f64::MAX), "100.00%");
    }
}
