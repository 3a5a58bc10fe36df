//! Text form of alarms, such as `p99=5ms`.

use fathom_core::Op;
use fathom_units::{parse_duration, short_duration};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The condition of an alarm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    /// Quantity that is compared with `time`.
    pub limit: Limit,
    /// Duration above which the alarm is raised, more than zero and at most 24 h.
    pub time: Duration,
}

/// Quantity that an alarm observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// A percentile, in thousandths, of the durations of an operation's requests in the last
    /// [`WINDOW`]. None: of all operations.
    Percentile(u16, Option<Op>),
    /// No request is in flight for longer.
    Oldest,
}

/// Length of the period whose requests a percentile covers.
pub const WINDOW: Duration = Duration::from_secs(10);

/// The supported percentiles: their names, and their values in thousandths.
const PERCENTILES: [(&str, u16); 4] = [("p50", 500), ("p90", 900), ("p99", 990), ("p999", 999)];

const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

impl FromStr for Alarm {
    type Err = String;

    fn from_str(text: &str) -> Result<Alarm, String> {
        let bad = || {
            format!(
                "'{text}' is not an alarm such as p99=5ms (or p50, p90, p999), read:p99=5ms for \
                 one operation, or older=10s"
            )
        };
        let (what, time) = text.split_once('=').ok_or_else(bad)?;
        let is_a_time = |time: &Duration| !time.is_zero() && *time <= LONGEST;
        let time = parse_duration(time)
            .ok()
            .filter(is_a_time)
            .ok_or_else(bad)?;
        let (op, percentile) = match what.split_once(':') {
            Some((op, percentile)) => {
                let op = Op::ALL.into_iter().find(|one| one.name() == op);
                (Some(op.ok_or_else(bad)?), percentile)
            }
            None => (None, what),
        };
        let known = PERCENTILES.iter().find(|(name, _)| *name == percentile);
        let limit = match known {
            Some((_, thousandths)) => Limit::Percentile(*thousandths, op),
            None if what == "older" => Limit::Oldest,
            None => return Err(bad()),
        };
        Ok(Alarm { limit, time })
    }
}

/// Formats the alarm as it is parsed, such as `p99=5ms`.
impl fmt::Display for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            Limit::Percentile(thousandths, op) => {
                if let Some(op) = op {
                    write!(f, "{}:", op.name())?;
                }
                f.write_str(name_of(thousandths))?;
            }
            Limit::Oldest => f.write_str("older")?,
        }
        write!(f, "={}", short_duration(self.time))
    }
}

/// Returns the name of a percentile, such as `p99`; empty for an unsupported percentile.
pub fn name_of(thousandths: u16) -> &'static str {
    let found = PERCENTILES.iter().find(|(_, known)| *known == thousandths);
    found.map_or("", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_are_read_as_they_are_written() {
        for text in [
            "p99=5ms",
            "read:p50=200us",
            "write_zeroes:p999=1s",
            "older=10s",
        ] {
            assert_eq!(text.parse::<Alarm>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "p99",
            "p98=5ms",
            "p99=0s",
            "p99=fast",
            "old=5s",
            "eat:p99=5s",
            "older=9999h",
            "read:older=1s",
        ] {
            let problem = text.parse::<Alarm>().unwrap_err();
            assert!(problem.contains("such as p99=5ms"), "{problem}");
        }
    }
}
