//! The time that a server may take to stop.

use fathom_units::parse_duration;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Time after a request to stop until requests in flight are abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopTimeout(pub Duration);

impl Default for StopTimeout {
    fn default() -> StopTimeout {
        StopTimeout(Duration::from_secs(10))
    }
}

impl FromStr for StopTimeout {
    type Err = String;

    fn from_str(text: &str) -> Result<StopTimeout, String> {
        // The limit makes sure that adding the time to an instant does not overflow.
        let is_short = |time: &Duration| *time <= Duration::from_secs(24 * 60 * 60);
        let time = parse_duration(text).ok().filter(is_short);
        let bad = || format!("'{text}' is not a time such as 10s, of at most a day");
        time.map(StopTimeout).ok_or_else(bad)
    }
}

impl fmt::Display for StopTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
