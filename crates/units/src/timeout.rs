//! Times that may be for ever.

use std::str::FromStr;
use std::time::Duration;

use crate::parse_duration;

/// A time to wait for something at most; `None`: for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout(pub Option<Duration>);

impl FromStr for Timeout {
    type Err = String;

    /// A time such as `30s`, or `off`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_given_time() {
        let parse = |text: &str| text.parse().map(|Timeout(time)| time);
        assert_eq!(parse("off"), Ok(None));
        assert_eq!(parse("1500ms"), Ok(Some(Duration::from_millis(1500))));
        for bad in ["", "0s", "5", "on", "-1s"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
