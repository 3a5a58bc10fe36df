//! Parses option values.

use crate::about::About;
use fathom_core::Clock;
use fathom_units::{parse_duration, parse_size};
use std::ops::Range;
use std::time::Duration;

/// Maximum for all times in options.
pub(crate) const LONGEST: Duration = Duration::from_secs(86_400);

/// The options of one filter.
pub(crate) struct Values<'a> {
    about: &'static About,
    raw: &'a [(&'static str, String)],
}

impl Values<'_> {
    pub(crate) fn new<'a>(about: &'static About, raw: &'a [(&'static str, String)]) -> Values<'a> {
        Values { about, raw }
    }

    /// Returns the value as the user wrote it.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        debug_assert!(self.about.option(name).is_ok(), "{name} is not declared");
        let written = self.raw.iter().find(|(known, _)| *known == name);
        written.map(|(_, value)| value.as_str())
    }

    /// Returns the parsed value, or the parsed default.
    pub(crate) fn get<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, String> {
        let default = self.about.option(name)?.default.unwrap_or_default();
        let text = self.text(name).unwrap_or(default);
        parse(text).map_err(|error| format!("{}: {name}: {error}", self.about.name))
    }

    /// Returns the parsed value; none if the user set no value.
    pub(crate) fn optional<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        match self.text(name) {
            Some(_) => self.get(name, parse).map(Some),
            None => Ok(None),
        }
    }
}

/// Parses a time of at most one day.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        _ if text == "0" => Ok(Duration::ZERO),
        Ok(time) if time <= LONGEST => Ok(time),
        Ok(_) => Err(format!("'{text}' is longer than a day")),
        Err(error) => Err(error),
    }
}

pub(crate) fn ticks(time: Duration) -> u64 {
    Clock::get().ticks(time)
}

pub(crate) fn size(text: &str) -> Result<u64, String> {
    parse_size(text)
}

pub(crate) fn number(text: &str) -> Result<u64, String> {
    let number = text.parse().ok();
    number.ok_or_else(|| format!("'{text}' is not a whole number"))
}

pub(crate) fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("'{text}' is not yes or no")),
    }
}

/// Parses `0.01` or `1%`.
pub(crate) fn probability(text: &str) -> Result<f64, String> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    let value = number.parse::<f64>().ok().map(|value| value / scale);
    value
        .filter(|value| (0.0..=1.0).contains(value))
        .ok_or_else(|| format!("'{text}' is not a probability such as 0.01 or 1%"))
}

/// Parses `OFFSET+LEN`.
pub(crate) fn range(text: &str) -> Result<Range<u64>, String> {
    let bad = || format!("'{text}' is not a range OFFSET+LEN such as 1M+4k");
    let (offset, len) = text.split_once('+').ok_or_else(bad)?;
    let (offset, len) = (parse_size(offset)?, parse_size(len)?);
    let end = offset.checked_add(len).ok_or_else(bad)?;
    Ok(offset..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_people_write_them() {
        assert_eq!(time("0"), Ok(Duration::ZERO));
        assert_eq!(time("20ms"), Ok(Duration::from_millis(20)));
        assert!(time("20").is_err() && time("86401s").is_err());
        assert_eq!(probability("1%"), Ok(0.01));
        assert_eq!(probability("0.5"), Ok(0.5));
        assert!(probability("2").is_err() && probability("NaN").is_err());
        assert_eq!(range("1M+4k"), Ok(1 << 20..(1 << 20) + 4096));
        assert!(range("1M").is_err() && range("16383P+1E").is_err());
        assert_eq!(yes_or_no("yes"), Ok(true));
        assert!(yes_or_no("true").is_err());
    }
}
