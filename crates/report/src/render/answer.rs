//! The sentence that begins a report: what limits the run, and the evidence.

use fathom_limiter::{UNKNOWN, named, words_for};
use fathom_run::RunKind;

use super::text::duration as plain_duration;
use super::verdict::{self, Duration, Piece};
use crate::analysis::Analysis;
use crate::impossible;

/// The suspected limiter of a run, from evidence around it: CPUs, threads, the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// Name of the rule, or [`UNKNOWN`].
    pub rule: String,
    /// The evidence in a line.
    pub text: String,
}

impl Suspect {
    /// Returns whether no rule holds.
    pub(crate) fn is_unknown(&self) -> bool {
        self.rule == UNKNOWN
    }

    /// Returns the name and the evidence, in the words of the live views.
    pub(crate) fn line(&self) -> String {
        named(&self.rule, &self.text)
    }

    /// Returns the advice of the documentation on this limiter.
    pub(crate) fn advice(&self) -> Option<&'static str> {
        words_for(&self.rule).map(|words| words.advice)
    }
}

/// The answer of a report.
pub(crate) struct Answer {
    /// The sentence, and further ones that belong to it.
    pub(crate) sentence: Vec<Piece>,
    /// Advice on the limiter, in a sentence.
    pub(crate) advice: Option<&'static str>,
    /// Errors of the figures themselves; the answer must not be trusted.
    pub(crate) errors: Vec<String>,
}

impl Answer {
    /// Returns the answer as plain text.
    pub(crate) fn text(&self) -> String {
        let pieces = self.sentence.iter().map(|piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Layer(_, name) => format!("'{name}'"),
        });
        pieces.collect()
    }
}

/// Answers for a run that follows requests, from the layers of the requests and, if it is known,
/// from the evidence around them. A limiter that the evidence names goes before the largest layer,
/// which is often its symptom.
pub(crate) fn of_run(run: &Analysis, suspect: Option<&Suspect>, duration: Duration) -> Answer {
    let held = suspect.filter(|suspect| !suspect.is_unknown());
    let text = |text: String| vec![Piece::Text(text)];
    let sentence = match (held, suspect) {
        (Some(held), _) => {
            let mut pieces = text(format!("Limited by {}.", held.line()));
            pieces.extend(verdict::largest(run, duration).unwrap_or_default());
            pieces
        }
        (None, Some(unknown)) => {
            let mut pieces = verdict::sentence(run, duration).unwrap_or_default();
            let space = if pieces.is_empty() { "" } else { " " };
            let line = format!("{space}The limiter is {}.", unknown.line());
            pieces.push(Piece::Text(line));
            pieces
        }
        (None, None) => {
            let layers = verdict::sentence(run, duration);
            layers.unwrap_or_else(|| text(without_layers(run)))
        }
    };
    Answer {
        sentence,
        advice: held.and_then(Suspect::advice),
        errors: impossible::sums(run.exact.as_ref(), run.wiki.as_ref()),
    }
}

/// Returns the answer of a run whose requests were not followed.
fn without_layers(run: &Analysis) -> String {
    let seen = run.qemu.iter().filter(|step| step.time.count > 0);
    let longest = seen.max_by(|a, b| a.time.mean.total_cmp(&b.time.mean));
    match longest {
        Some(step) if run.kind == RunKind::Qemu => format!(
            "The longest step within QEMU ends with '{}': {} a request.",
            step.today,
            plain_duration(step.time.mean)
        ),
        _ => "The limiter is unknown: no request could be followed through all layers.".into(),
    }
}
