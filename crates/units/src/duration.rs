//! Reads and formats durations.

use std::time::Duration;

const UNITS: [(&str, u64); 6] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Reads a number with a unit: `500ms`, `1.5s`, `10us`, `2h`.
///
/// # Errors
/// Returns a one-line message if `text` is not a duration, or if the duration is too long.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("'{text}' is not a time like 500us, 20ms or 2s");
    let number_ends = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(number_ends.ok_or_else(bad)?);
    let (_, ns) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(bad)?;
    let (whole, fraction) = match number.split_once('.') {
        Some((_, fraction)) if fraction.is_empty() || fraction.contains('.') => return Err(bad()),
        Some(parts) => parts,
        None => (number, ""),
    };
    if whole.is_empty() || fraction.len() > 18 {
        return Err(bad());
    }
    let too_long = || format!("'{text}' is too long");
    let whole: u64 = whole.parse().map_err(|_| too_long())?;
    let part: u128 = format!("0{fraction}").parse().map_err(|_| bad())?;
    // The fraction is less than one unit, so it fits.
    let part = (part * u128::from(*ns) / 10_u128.pow(fraction.len() as u32)) as u64;
    let total = whole.checked_mul(*ns).and_then(|ns| ns.checked_add(part));
    total.map(Duration::from_nanos).ok_or_else(too_long)
}

/// Reads a duration like [`parse_duration`], or a bare number as seconds, as in fio's `runtime`.
///
/// # Errors
/// Like [`parse_duration`].
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let bare = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    match bare && !text.is_empty() {
        true => parse_duration(&format!("{text}s")),
        false => parse_duration(text),
    }
}

/// Returns the shortest text without a fraction that [`parse_duration`] reads as this duration.
pub fn short_duration(time: Duration) -> String {
    let ns = time.as_nanos();
    let fits = |(_, unit): &&(&str, u64)| ns.is_multiple_of(u128::from(*unit));
    match UNITS.iter().rev().find(fits) {
        Some((name, unit)) if ns > 0 => format!("{}{name}", ns / u128::from(*unit)),
        _ => "0s".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_people_write_them() {
        for (text, ns) in [
            ("0s", 0),
            ("7ns", 7),
            ("500us", 500_000),
            ("20ms", 20_000_000),
            ("1.5s", 1_500_000_000),
            ("0.25us", 250),
            ("2m", 120_000_000_000),
            ("5124095h", 18_446_742_000_000_000_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(ns)), "{text}");
        }
        for bad in [
            "",
            "5",
            "s",
            ".5s",
            "1.s",
            "1.2.3s",
            "-1s",
            "1 s",
            "1d",
            "1S",
            "5124096h",
            "1\u{e9}",
            "99999999999999999999s",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_number_alone_may_be_seconds() {
        assert_eq!(parse_seconds("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_seconds("10ms"), Ok(Duration::from_millis(10)));
        assert!(parse_seconds("").is_err() && parse_seconds(".").is_err());
    }

    #[test]
    fn short_durations_are_read_as_the_same() {
        for ns in [0, 1, 1_500, 20_000_000, 90_000_000_000, 7_200_000_000_000] {
            let time = Duration::from_nanos(ns);
            assert_eq!(parse_duration(&short_duration(time)), Ok(time));
        }
        assert_eq!(short_duration(Duration::from_secs(90)), "90s");
    }
}
