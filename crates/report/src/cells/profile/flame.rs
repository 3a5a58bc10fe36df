//! Flame graphs: separate documents that the page shows in frames, so that the names and scripts of
//! several graphs do not clash.

use fathom_run::Folded;
use inferno::differential;
use inferno::flamegraph::{self, Options, TextTruncateDirection};

use crate::render::text::clean;

/// Narrowest frame in percent of the width; narrower ones are left out.
const NARROWEST: f64 = 0.1;

/// A document with a flame graph.
pub(super) struct Graph {
    pub document: String,
    /// Height in pixels.
    pub height: u32,
}

/// Draws a flame graph; `None` without stacks.
pub(super) fn graph(title: &str, folded: &Folded) -> Option<Graph> {
    draw(title, &lines(folded))
}

/// Draws a differential flame graph. Widths are B's. Red frames have a greater share in B than in
/// A, blue frames a smaller one.
pub(super) fn difference(title: &str, a: &Folded, b: &Folded) -> Option<Graph> {
    let [a, b] = [a, b].map(|folded| lines(folded).join("\n"));
    let options = differential::Options {
        normalize: true,
        ..differential::Options::default()
    };
    let mut both = Vec::new();
    differential::from_readers(options, a.as_bytes(), b.as_bytes(), &mut both).ok()?;
    let both = String::from_utf8_lossy(&both);
    let mut both: Vec<String> = both.lines().map(str::to_owned).collect();
    both.sort_unstable();
    draw(title, &both)
}

fn draw(title: &str, lines: &[String]) -> Option<Graph> {
    let mut options = Options::default();
    options.title = title.to_owned();
    options.deterministic = true;
    options.min_width = NARROWEST;
    // Keep the start of names, which is their most important part.
    options.text_truncate_direction = TextTruncateDirection::Right;
    let mut svg = Vec::new();
    let lines = lines.iter().map(String::as_str);
    flamegraph::from_lines(&mut options, lines, &mut svg).ok()?;
    let svg = String::from_utf8(svg).ok()?;
    // Remove the XML prologue: the document is HTML.
    let (_, svg) = svg.split_once("<svg ")?;
    let (_, height) = svg.split_once(" height=\"")?;
    let height = height.split('"').next()?.parse().ok()?;
    Some(Graph {
        document: format!("{BEFORE}<svg {svg}"),
        height,
    })
}

/// Start of the document. The graph's script keeps its state in the document's address, which a
/// frame does not have, so `replaceState` is disabled.
const BEFORE: &str = "<!doctype html><meta charset=\"utf-8\">\
    <meta name=\"color-scheme\" content=\"light dark\">\
    <style>body { margin: 0 } svg { display: block; width: 100% }
    svg > rect { fill: #fff }
    #frames rect { stroke: #8888; stroke-width: 0.5px }
    @media (prefers-color-scheme: dark) {
        svg > rect { fill: #16191d }
        svg > text { fill: #d5d9de }
    }</style>\
    <script>history.replaceState = function () {};</script>";

/// Returns lines of stack and count that the parser accepts, for any names.
fn lines(folded: &Folded) -> Vec<String> {
    let line = |(mut stack, count): (Vec<&str>, u64)| {
        let innermost = stack.pop().unwrap_or_default();
        // The parser would take a number at the end for a count.
        let innermost = match innermost.ends_with(|c: char| c.is_ascii_digit()) {
            true => innermost.replace(' ', "\u{a0}"),
            false => innermost.to_owned(),
        };
        stack.push(&innermost);
        format!("{} {count}", clean(&stack.join(";")))
    };
    let mut lines: Vec<String> = folded.stacks().map(line).collect();
    lines.sort_unstable();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn folded(stacks: &[(&[&str], u64)]) -> Folded {
        let mut folded = Folded::default();
        for (stack, count) in stacks {
            folded.add(stack.iter().copied(), *count);
        }
        folded
    }

    #[test]
    fn a_frame_is_as_wide_as_its_samples() {
        let stacks: [(&[&str], u64); 3] = [
            (&["fio", "main [fio]", "read [libc.so.6]"], 75),
            (&["fio", "main [fio]"], 5),
            (&["worker 0"], 20),
        ];
        let graph = graph("Guest", &folded(&stacks)).unwrap();
        for title in [
            "read [libc.so.6] (75 samples, 75.00%)",
            "main [fio] (80 samples, 80.00%)",
            "worker\u{a0}0 (20 samples, 20.00%)",
        ] {
            assert!(graph.document.contains(title), "{title}");
        }
        assert!(graph.height > 50 && graph.height < 300, "{}", graph.height);
        assert!(super::graph("Guest", &Folded::default()).is_none());
    }

    #[test]
    fn a_difference_is_of_shares() {
        let a = folded(&[(&["a", "f [x]"], 10), (&["a", "g [x]"], 10)]);
        let b = folded(&[(&["a", "f [x]"], 150), (&["a", "g [x]"], 50)]);
        let graph = difference("Guest", &a, &b).unwrap();
        assert!(
            graph
                .document
                .contains("f [x] (150 samples, 75.00%; +25.00%)"),
            "{}",
            graph.document
        );
        assert!(
            graph
                .document
                .contains("g [x] (50 samples, 25.00%; -25.00%)")
        );
        assert!(difference("Guest", &Folded::default(), &b).is_some());
    }

    proptest! {
        #[test]
        fn any_names_are_drawn_as_text(names in proptest::collection::vec(".{0,20}|[<>&;0-9 \"]{0,9}", 1..6), count: u64) {
            let folded = folded(&[(&names.iter().map(String::as_str).collect::<Vec<_>>(), count)]);
            let twice = difference("x", &folded, &folded);
            prop_assert_eq!(twice.is_some(), count > 0);
            if let Some(one) = graph("x", &folded) {
                let after = one.document.split("</script>").last().unwrap();
                prop_assert!(!after.contains("<script"));
            }
        }
    }
}
