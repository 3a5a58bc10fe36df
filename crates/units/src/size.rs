//! Reads and formats sizes.

use std::fmt;

const UNITS: [&str; 6] = ["k", "m", "g", "t", "p", "e"];

/// Reads a size in bytes: `4G`, `1.5G`, `64k`, `512`, `0x200`.
///
/// Units are powers of 1024: `64k`, `64K`, `64KB` and `64KiB` are the same.
///
/// # Errors
/// Returns a one-line message if `text` is not a size, or if the size is too large.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || format!("'{text}' is not a size like 4G, 1.5G, 64k or 512");
    let too_large = || format!("'{text}' is too large");
    let is_hex = |digits: &&str| digits.bytes().all(|b| b.is_ascii_hexdigit());
    let hex = text.strip_prefix("0x").or(text.strip_prefix("0X"));
    if let Some(digits) = hex.filter(|digits| !digits.is_empty()).filter(is_hex) {
        return u64::from_str_radix(digits, 16).map_err(|_| too_large());
    }
    let (whole, rest) = digits(text);
    let (fraction, suffix) = match rest.strip_prefix('.').map(digits) {
        Some(("", _)) => return Err(bad()),
        Some(parts) => parts,
        None => ("", rest),
    };
    let suffix = suffix.to_ascii_lowercase();
    let power = match suffix.as_str() {
        // A number of bytes has no fraction other than zero.
        "" | "b" if fraction.bytes().all(|digit| digit == b'0') => 0,
        _ => {
            let unit = suffix.strip_suffix("ib").or(suffix.strip_suffix('b'));
            let unit = unit.unwrap_or(&suffix);
            1 + UNITS.iter().position(|u| *u == unit).ok_or_else(bad)?
        }
    };
    if whole.is_empty() || fraction.len() > 18 {
        return Err(bad());
    }
    let unit = 1 << (10 * power);
    let size = whole.parse().ok().and_then(|n: u64| n.checked_mul(unit));
    let part: u128 = format!("0{fraction}").parse().map_err(|_| bad())?;
    let part = part * u128::from(unit) / 10_u128.pow(fraction.len() as u32);
    // The fraction is less than one unit, so it fits.
    let size = size.and_then(|size| size.checked_add(part as u64));
    size.ok_or_else(too_large)
}

/// Splits a text after its leading decimal digits.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// Returns the shortest text that [`parse_size`] reads as this number of bytes: `4k`, `1536`, `3G`.
pub fn short_size(bytes: u64) -> String {
    let units = [
        (1u64 << 40, "T"),
        (1 << 30, "G"),
        (1 << 20, "M"),
        (1 << 10, "k"),
    ];
    let fits = |(unit, _): &&(u64, &str)| bytes >= *unit && bytes.is_multiple_of(*unit);
    match units.iter().find(fits) {
        Some((unit, name)) => format!("{}{name}", bytes / unit),
        None => bytes.to_string(),
    }
}

/// A number of bytes that is displayed with a unit: `4 GiB`, `1.5 TiB`.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let power = (self.0.max(1).ilog2() / 10) as usize;
        let unit = 1u64 << (10 * power);
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {}", self.0 / unit, NAMES[power])
        } else {
            write!(f, "{:.1} {}", self.0 as f64 / unit as f64, NAMES[power])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_people_write_them() {
        for (text, size) in [
            ("0", 0),
            ("512", 512),
            ("1024.0", 1024),
            ("64k", 64 << 10),
            ("64KiB", 64 << 10),
            ("10MB", 10 << 20),
            ("4G", 4 << 30),
            ("1t", 1 << 40),
            ("15E", 15 << 60),
            ("1.5G", 3 << 29),
            ("0.25k", 256),
            ("15.5E", 31 << 59),
            ("0x200", 512),
            ("0Xff", 255),
        ] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
        for bad in [
            "",
            "k",
            "-1",
            "1.5",
            "1.5b",
            "1.G",
            ".5G",
            "1.2.3G",
            "0x",
            "0x1k",
            "0x10000000000000000",
            "4 G",
            "4X",
            "4ib",
            "16E",
            "4é",
            "99999999999999999999",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn short_sizes_are_read_as_the_same() {
        for size in [0, 1, 512, 1536, 4096, 1 << 20, 3 << 29, 1 << 40, u64::MAX] {
            assert_eq!(parse_size(&short_size(size)), Ok(size));
        }
        assert_eq!(short_size(65536), "64k");
    }

    #[test]
    fn sizes_are_shown_as_people_read_them() {
        for (size, text) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (4 << 30, "4 GiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(Size(size).to_string(), text);
        }
    }
}
