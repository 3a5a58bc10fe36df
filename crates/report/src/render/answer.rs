//! The sentence that begins a report: what limits the run, and the evidence.

use fathom_limiter::{UNKNOWN, words_for};
use fathom_run::RunKind;

use super::impossible;
use super::text::duration as plain_duration;
use super::verdict::{self, Duration, Piece};
use crate::analysis::Analysis;

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

    /// Returns the name and the evidence, such as `client: keeps 0.2 requests in flight`. A text
    /// that begins with the name is not prefixed with it a second time.
    pub(crate) fn line(&self) -> String {
        let rest = self.text.strip_prefix(&self.rule);
        if rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)) {
            return self.text.clone();
        }
        let in_words = format!("{}: ", self.rule.replace('-', " "));
        let text = self.text.strip_prefix(&in_words).unwrap_or(&self.text);
        format!("{}: {text}", self.rule)
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
        errors: impossible::sums(run),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn suspect(rule: &str, text: &str) -> Suspect {
        Suspect {
            rule: rule.into(),
            text: text.into(),
        }
    }

    #[test]
    fn name_of_the_limiter_comes_once() {
        let client = suspect("client", "client: keeps 0.2 requests in flight");
        assert_eq!(client.line(), client.text);
        let device = suspect("device", "device vda: 31.8 of 32 in flight");
        assert_eq!(device.line(), device.text);
        let thread = suspect("thread", "I/O thread 'worker 0' on CPU 98%");
        assert_eq!(thread.line(), "thread: I/O thread 'worker 0' on CPU 98%");
        let queue = suspect("run-queue", "run queue: vCPU 'CPU 0/KVM' waited for a CPU");
        assert!(
            queue
                .line()
                .starts_with("run-queue: vCPU 'CPU 0/KVM' waited")
        );
        assert!(queue.advice().unwrap().contains("CPUs of their own"));
        assert_eq!(suspect("none", "").advice(), None);
    }
}
