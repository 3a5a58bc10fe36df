//! Calendar dates.

use std::fmt;

/// A date and time of the civil calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    /// Year of the Gregorian calendar.
    pub year: u64,
    /// Month, from 1 to 12.
    pub month: u64,
    /// Day of the month, from 1 to 31.
    pub day: u64,
    /// Hour, from 0 to 23.
    pub hour: u64,
    /// Minute, from 0 to 59.
    pub minute: u64,
    /// Second, from 0 to 59.
    pub second: u64,
}

impl Utc {
    /// Converts seconds since 1970, after Hinnant's `civil_from_days`: years begin in March, so
    /// that the leap day comes last.
    pub fn from_seconds(seconds: u64) -> Utc {
        let (days, rest) = (seconds / 86_400, seconds % 86_400);
        let days = days + 719_468; // Days since 0000-03-01.
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let (month, next) = match month {
            0..10 => (month + 3, 0),
            _ => (month - 9, 1),
        };
        Utc {
            year: year + era * 400 + next,
            month,
            day,
            hour: rest / 3600,
            minute: rest / 60 % 60,
            second: rest % 60,
        }
    }
}

/// Formats the date like `2026-11-23 05:40:11`.
impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Utc {
            year,
            month,
            day,
            hour,
            minute,
            second,
        } = self;
        write!(
            f,
            "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Compares with the output of date(1).
    #[test]
    fn dates_are_those_of_the_calendar() {
        for seconds in [
            0,
            951_782_399,
            951_782_400,
            951_868_800,
            1_790_000_000,
            4_107_542_399,
        ] {
            let at = format!("@{seconds}");
            let mut date = Command::new("date");
            date.args(["-u", "-d", &at, "+%Y-%m-%d %H:%M:%S"]);
            let said = date.output().unwrap().stdout;
            let text = format!("{}\n", Utc::from_seconds(seconds));
            assert_eq!(text, String::from_utf8(said).unwrap());
        }
    }
}
