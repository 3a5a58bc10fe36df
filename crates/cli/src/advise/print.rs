//! Prints advice as text and as JSON.

use super::trial::{Plan, Tried};
use super::watch::Watched;
use anyhow::Context;
use fathom_advise::{Advice, Effect, Judgement, Measure, Outcome};
use fathom_img::shown;
use serde_json::{Value, json};
use std::io::Write;

/// A change, and the result of its trial if it was tried.
pub struct Offered {
    pub advice: Advice,
    pub tried: Option<Tried>,
}

/// The result of the command.
pub struct Report<'a> {
    pub disk: &'a str,
    /// The server as the user named it, for the commands. `None`: the disk's name is enough.
    pub server: Option<&'a str>,
    pub watched: &'a Watched,
    pub plan: Plan,
    /// The changes, or why none helps.
    pub outcome: Result<Vec<Offered>, String>,
    /// Index of the change that the disk keeps.
    pub kept: Option<usize>,
}

impl<'a> Report<'a> {
    pub fn new(disk: &'a str, watched: &'a Watched, plan: Plan, outcome: Outcome) -> Report<'a> {
        let offered = |advice| Offered {
            advice,
            tried: None,
        };
        Report {
            disk,
            server: None,
            watched,
            plan,
            outcome: match outcome {
                Outcome::Changes(all) => Ok(all.into_iter().map(offered).collect()),
                Outcome::Nothing(reason) => Err(reason),
            },
            kept: None,
        }
    }

    fn command(&self, advice: &Advice) -> String {
        let command = advice.change.command(self.disk);
        match self.server {
            Some(server) => format!("{command} --server {server}"),
            None => command,
        }
    }

    pub fn print(&self, json: bool) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match json {
            true => writeln!(out, "{}", self.json()?)?,
            false => self.print_text(&mut out)?,
        }
        Ok(out.flush()?)
    }

    fn json(&self) -> anyhow::Result<Value> {
        let numbers = self.watched.numbers()?;
        let changes = self.outcome.iter().flatten().map(|one| {
            let change = &one.advice.change;
            json!({
                "option": change.option(),
                "title": change.title(),
                "why": one.advice.why,
                "price": change.price(),
                "command": self.command(&one.advice),
                "trial": one.tried.as_ref().map(|tried| self.trial(tried)),
            })
        });
        Ok(json!({
            "disk": self.disk,
            "seconds": numbers.seconds,
            "limiter": serde_json::to_value(&numbers.limiter).context("the limiter")?,
            "all": serde_json::to_value(&numbers.all).context("the numbers")?,
            "changes": changes.collect::<Vec<_>>(),
            "nothing": self.outcome.as_ref().err(),
            "kept": self.kept,
        }))
    }

    fn trial(&self, tried: &Tried) -> Value {
        let effects = tried.effects().into_iter().map(|(measure, effect)| {
            let Effect {
                ratio,
                low,
                high,
                confidence,
                pairs,
            } = effect;
            let value = json!({
                "ratio": ratio, "low": low, "high": high, "confidence": confidence, "pairs": pairs,
            });
            (key(measure).to_owned(), value)
        });
        json!({
            "pairs": tried.pairs.len(),
            "round_ms": self.plan.round.as_millis() as u64,
            "effects": effects.collect::<serde_json::Map<_, _>>(),
            "judgement": match tried.judgement() {
                Some(Judgement::Better(_)) => "better",
                Some(Judgement::Worse) => "worse",
                Some(Judgement::NoDifference) => "no-difference",
                None => "stopped",
            },
            "problem": tried.stopped,
        })
    }

    fn print_text(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let numbers = self.watched.numbers()?;
        let time = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.0} us"));
        writeln!(
            out,
            "{}: {:.0} IOPS, p50 {}, p99 {}, {:.1} in flight, in {:.1} s",
            self.disk,
            numbers.all.iops,
            time(numbers.all.p50_us),
            time(numbers.all.p99_us),
            numbers.mean_in_flight,
            numbers.seconds
        )?;
        writeln!(out, "limited by: {}", shown(&numbers.limiter.text))?;
        let offered = match &self.outcome {
            Ok(offered) => offered,
            Err(reason) => {
                writeln!(out, "nothing here will help: {}", shown(reason))?;
                return Ok(());
            }
        };
        for (index, one) in offered.iter().enumerate() {
            let change = &one.advice.change;
            writeln!(out, "\n{}. {}", index + 1, shown(&change.title()))?;
            writeln!(out, "   why:     {}", shown(&one.advice.why))?;
            writeln!(out, "   price:   {}", change.price())?;
            writeln!(out, "   command: {}", shown(&self.command(&one.advice)))?;
            if let Some(tried) = &one.tried {
                print_trial(out, tried)?;
            }
            if self.kept == Some(index) {
                writeln!(out, "   kept")?;
            }
        }
        Ok(())
    }
}

fn print_trial(out: &mut impl Write, tried: &Tried) -> std::io::Result<()> {
    let effects = tried.effects();
    let texts: Vec<_> = effects
        .iter()
        .map(|(measure, effect)| text(*measure, effect))
        .collect();
    if let Some((_, effect)) = effects.first() {
        writeln!(
            out,
            "   tried:   {} pairs of rounds, intervals with a confidence of {:.0}%",
            effect.pairs,
            effect.confidence * 100.0
        )?;
    }
    for text in texts {
        writeln!(out, "            {text}")?;
    }
    let result = match (&tried.stopped, tried.judgement()) {
        (Some(problem), _) => format!("stopped: {}", shown(problem)),
        (None, Some(Judgement::Better(_))) => "better".to_owned(),
        (None, Some(Judgement::Worse)) => "worse".to_owned(),
        (None, _) => "no difference".to_owned(),
    };
    writeln!(out, "   result:  {result}")
}

/// Returns an effect such as `IOPS +35% (+10% to +60%)`.
fn text(measure: Measure, effect: &Effect) -> String {
    let change = |ratio: f64| format!("{:+.0}%", (ratio - 1.0) * 100.0);
    format!(
        "{} {} ({} to {})",
        measure.name(),
        change(effect.ratio),
        change(effect.low),
        change(effect.high)
    )
}

/// Returns the name of a measure in JSON.
fn key(measure: Measure) -> &'static str {
    match measure {
        Measure::Iops => "iops",
        Measure::P50 => "p50",
        Measure::P99 => "p99",
        Measure::Cpu => "cpu_per_request",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effect_is_printed_as_a_difference() {
        let effect = Effect {
            ratio: 1.35,
            low: 0.9,
            high: 12.0,
            confidence: 0.97,
            pairs: 6,
        };
        assert_eq!(text(Measure::P99, &effect), "p99 +35% (-10% to +1100%)");
    }
}
