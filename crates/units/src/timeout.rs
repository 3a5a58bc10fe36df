//! Timeouts that can be switched off.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::{parse_duration, short_duration};

/// Maximum time to wait; `None` waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout(pub Option<Duration>);

impl FromStr for Timeout {
    type Err = String;

    /// Reads a duration such as `30s`, or `off`. A duration of zero is an error.
    fn from_str(text: &str) -> Result<Timeout, String> {
        match text {
            "off" => Ok(Timeout(None)),
            _ => match parse_duration(text).ok().filter(|time| !time.is_zero()) {
                Some(time) => Ok(Timeout(Some(time))),
                None => Err(format!("'{text}' is not off, or a time such as 30s")),
            },
        }
    }
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(time) => f.write_str(&short_duration(time)),
            None => f.write_str("off"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_given_time() {
        let parse = |text: &str| text.parse().map(|Timeout(time)| time);
        assert_eq!(parse("off"), Ok(None));
        for text in ["off", "90s", "1500ms"] {
            let timeout: Timeout = text.parse().unwrap();
            assert_eq!(timeout.to_string().parse(), Ok(timeout));
        }
        assert_eq!(parse("1500ms"), Ok(Some(Duration::from_millis(1500))));
        for bad in ["", "0s", "5", "on", "-1s"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
