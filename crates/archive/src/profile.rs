//! Boot profiles: what boots of an image read first, as text.
//!
//! Each line is a byte range, `OFFSET LENGTH`. The lines are in the order of the reads. The format
//! does not depend on the stripe size.

use std::collections::HashSet;
use std::fmt::Write;

/// Maximum number of stripes in a profile.
pub const MOST: usize = 1 << 16;

/// Parses a profile into numbers of stripes of `stripe` bytes, each once and at most [`MOST`] of
/// them.
///
/// The error is one line and starts with the line number in `text`.
pub fn parse(text: &str, stripe: u64) -> Result<Vec<u32>, String> {
    let mut order = Vec::new();
    let mut known = HashSet::new();
    for (line, at) in text.lines().zip(1..) {
        let mut stripes = stripes_of(line, stripe).ok_or_else(|| {
            format!("{at}: '{line}' is not a range of an image; write OFFSET LENGTH, in bytes")
        })?;
        while order.len() < MOST
            && let Some(stripe) = stripes.next()
        {
            if known.insert(stripe) {
                order.push(stripe);
            }
        }
    }
    Ok(order)
}

fn stripes_of(line: &str, stripe: u64) -> Option<std::ops::RangeInclusive<u32>> {
    let mut numbers = line.split_whitespace().map(|word| word.parse::<u64>().ok());
    let (offset, len) = (numbers.next()??, numbers.next()??);
    let last = offset.checked_add(len.checked_sub(1)?)?;
    let number = |at: u64| u32::try_from(at / stripe).ok();
    let all = number(offset)?..=number(last)?;
    numbers.next().is_none().then_some(all)
}

/// Formats these stripes of `stripe` bytes as a profile.
pub fn text(order: &[u32], stripe: u64) -> String {
    let mut text = String::new();
    let mut rest = order;
    while let Some(&first) = rest.first() {
        let follows = |(n, stripe): &(u32, &u32)| first.checked_add(*n) == Some(**stripe);
        let count = (0..).zip(rest).take_while(follows).count();
        let at = u64::from(first) * stripe;
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "{at} {}", count as u64 * stripe);
        rest = &rest[count..];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_read_as_it_was_written() {
        let order = [5, 6, 7, 0, 100, 99, u32::MAX];
        let text = text(&order, 1 << 18);
        assert!(text.starts_with("1310720 786432\n0 262144\n"), "{text}");
        assert_eq!(parse(&text, 1 << 18).unwrap(), order);
        // With another stripe size, each stripe still occurs once.
        assert_eq!(
            parse("1310720 786432\n0 262144\n26214400 1\n", 1 << 20).unwrap(),
            [1, 0, 25]
        );
        assert_eq!(parse("0 18446744073709551615", 1 << 60).unwrap().len(), 16);
        assert_eq!(parse("0 1000000000", 1).unwrap().len(), MOST);
        assert!(parse("", 4096).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_range_is_told() {
        for bad in [
            "x",
            "1",
            "1 0",
            "1 2 3",
            "-1 2",
            "18446744073709551615 2",
            "9999999999 1",
        ] {
            let error = parse(&format!("0 1\n{bad}"), 1).unwrap_err();
            assert!(error.starts_with("2: ") && error.contains(bad), "{error}");
        }
    }
}
