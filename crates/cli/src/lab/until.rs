//! `--until`: adds rounds to a run until its intervals are narrow enough.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use fathom_lab::experiment::runner::Decision;
use fathom_report::cells::{Confidence, Table};
use fathom_units::{parse_duration, short_duration};

// Options of when a run ends. (A doc comment would become the commands' description.)
#[derive(Debug, Clone, Copy, Args)]
pub struct Goal {
    /// Add rounds until the intervals are at most this wide, such as 5%
    ///
    /// The intervals are those of the main measure's ratios, or of the measure itself if nothing is
    /// compared. A width is relative: 0.98..1.03 around 1.00 is 5%. Rounds are also added until
    /// there are enough for verdicts. Whether a difference has been shown does not count, because a
    /// run that ends with its first verdict often has a wrong one.
    #[arg(long, value_name = "WIDTH", value_parser = parse_width, help_heading = "Run")]
    pub until: Option<f64>,
    /// Maximum number of rounds with --until
    #[arg(long, value_name = "N", default_value_t = 50, requires = "until",
          value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Run",
          hide_short_help = true)]
    max_rounds: u32,
    /// Maximum time of the command with --until, such as 2h [default: no limit]
    ///
    /// A round that would probably end later is not begun. The first --rounds run in any case.
    #[arg(long, value_name = "TIME", requires = "until", value_parser = parse_duration,
          help_heading = "Run", hide_short_help = true)]
    max_time: Option<Duration>,
}

/// Reads a percentage.
fn parse_width(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').and_then(|text| text.parse().ok());
    let width = percent.filter(|percent| (0.01..=1000.0).contains(percent));
    width
        .map(|percent: f64| percent / 100.0)
        .ok_or_else(|| format!("'{text}' is not a width such as 5%; 0.01% to 1000% are"))
}

/// Decides whether a run needs another round.
pub struct Watch {
    goal: Goal,
    width: f64,
    begun: Instant,
    /// Time at which the last decision was made.
    decided: Option<Instant>,
}

impl Goal {
    /// Returns the watch over a run that begins now, if the run has a goal.
    pub fn watch(self) -> Option<Watch> {
        Some(Watch {
            goal: self,
            width: self.until?,
            begun: Instant::now(),
            decided: None,
        })
    }

    /// Returns the words for the rounds that may follow a plan.
    pub fn more(self) -> String {
        match self.until {
            Some(_) => format!(", and more rounds, up to {}", self.max_rounds),
            None => String::new(),
        }
    }
}

impl Watch {
    /// Decides by the results so far.
    ///
    /// # Errors
    /// If the run cannot be read.
    pub fn decide(&mut self, dir: &Path) -> fathom_lab::Result<Decision> {
        let table = Table::load(dir)?;
        let now = Instant::now();
        // The time of the last added round is that of the next one.
        let last = self.decided.replace(now).map(|before| now - before);
        let taken = now - self.begun + last.unwrap_or_default();
        Ok(self.decide_by(&table.confidence(self.width), table.rounds, taken))
    }

    /// Decides by the confidence, the number of rounds, and the time that another round would end.
    fn decide_by(&self, confidence: &Confidence, rounds: u32, taken: Duration) -> Decision {
        let why = match confidence {
            Confidence::Enough(why) | Confidence::Never(why) => return Decision::End(why.clone()),
            Confidence::NotYet(why) => why.clone(),
        };
        let Goal {
            max_rounds,
            max_time,
            ..
        } = self.goal;
        match max_time {
            _ if rounds >= max_rounds => {
                Decision::End(format!("--max-rounds {max_rounds} is reached; {why}"))
            }
            Some(most) if taken > most => Decision::End(format!(
                "--max-time {} is reached; {why}",
                short_duration(most)
            )),
            _ => Decision::AnotherRound(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(max_time: Option<Duration>) -> Watch {
        let goal = Goal {
            until: Some(0.05),
            max_rounds: 8,
            max_time,
        };
        goal.watch().unwrap()
    }

    #[test]
    fn a_width_is_a_percentage() {
        assert_eq!(parse_width("5%"), Ok(0.05));
        assert_eq!(parse_width("0.5%"), Ok(0.005));
        for bad in ["5", "0.05", "0%", "-1%", "nan%", "inf%", "1001%", "%", ""] {
            let error = parse_width(bad).unwrap_err();
            assert!(error.contains("is not a width such as 5%"), "{error}");
        }
    }

    #[test]
    fn rounds_are_added_until_a_goal_or_a_limit_is_reached() {
        let wide = Confidence::NotYet("too wide".into());
        let short = Duration::from_secs(60);
        let decide = |max_time, confidence: &Confidence, rounds, taken| {
            watch(max_time).decide_by(confidence, rounds, taken)
        };
        let end = |why: &str| Decision::End(why.into());
        let more = Decision::AnotherRound("too wide".into());
        assert_eq!(decide(None, &wide, 7, short), more);
        assert_eq!(decide(Some(short), &wide, 7, short), more);
        let rounds = end("--max-rounds 8 is reached; too wide");
        assert_eq!(decide(None, &wide, 8, short), rounds);
        let time = end("--max-time 1m is reached; too wide");
        assert_eq!(decide(Some(short), &wide, 7, short * 2), time);
        let enough = Confidence::Enough("narrow".into());
        assert_eq!(decide(None, &enough, 3, short), end("narrow"));
        let never = Confidence::Never("nothing measured".into());
        assert_eq!(decide(None, &never, 3, short), end("nothing measured"));
    }

    #[test]
    fn a_run_without_a_goal_has_no_watch() {
        let goal = Goal {
            until: None,
            ..watch(None).goal
        };
        assert!(goal.watch().is_none());
        assert_eq!(goal.more(), "");
    }
}
