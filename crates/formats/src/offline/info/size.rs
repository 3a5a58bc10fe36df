//! Formats sizes as QEMU does.

use std::fmt;

/// Formats a number of bytes with three significant digits: `28.5 KiB`, `0 B`.
pub struct Units(pub u64);

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        // A unit is used up to 999 of it, so that there are never four digits.
        let scaled = self.0 as f64 * 1.024;
        let power = if scaled < 1.0 {
            0
        } else {
            (scaled.log2().floor() as usize / 10).min(6)
        };
        let value = self.0 as f64 / (1u64 << (10 * power)) as f64;
        write!(f, "{} {}B", three_digits(value), NAMES[power])
    }
}

/// Formats a number from 0 to 1000 as C's `%.3g` does.
fn three_digits(value: f64) -> String {
    let decimals = match value {
        v if v < 0.9995 => 3,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        v if v < 999.5 => 0,
        _ => return "1e+03".to_owned(),
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_look_like_those_of_qemu_img() {
        for (bytes, text) in [
            (0, "0 B"),
            (1, "1 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (29184, "28.5 KiB"),
            (10 << 20, "10 MiB"),
            (262_144, "256 KiB"),
            (1000 << 10, "0.977 MiB"),
            (3 << 29, "1.5 GiB"),
            (1 << 40, "1 TiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Units(bytes).to_string(), text);
        }
    }
}
