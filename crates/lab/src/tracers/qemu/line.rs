//! Parses one line of QEMU's `log` trace backend.
//!
//! The line formats, by version:
//! - `EVENT ARGS`, without `-msg timestamp=on`;
//! - `TID@SECONDS.MICROSECONDS:EVENT ARGS`, with it, up to 10.1;
//! - `2025-09-01T12:00:00.123456Z EVENT ARGS` in later versions, where QEMU may write the guest's
//!   name and `PROGRAM(TID:THREAD): ` before the event.

/// Maximum number of an event's numbers to keep: the room in [`fathom_run::Kind::Qemu`].
pub(super) const NUMBERS: usize = 6;

/// An event, as in the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEvent<'a> {
    /// CLOCK_REALTIME in nanoseconds, or `None` without a timestamp.
    pub time: Option<u64>,
    /// Thread id, or 0 if the format has none.
    pub tid: u32,
    /// Name of the event in QEMU's `trace-events`.
    pub name: &'a str,
    /// The arguments as text.
    pub args: &'a str,
}

/// Kind of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// An event with its arguments.
    Event(LogEvent<'a>),
    /// Other output of QEMU.
    Other,
    /// Begins like an event but is torn, overwritten or cut.
    Garbled,
}

/// Parses a line without its line end.
pub fn parse(line: &str) -> Line<'_> {
    if let Some((stamp, rest)) = iso_prefix(line) {
        return match stamp {
            Some(time) => event(Some(time), context(rest)),
            None => Line::Garbled,
        };
    }
    if line.starts_with(|c: char| c.is_ascii_digit()) {
        return match tid_prefix(line) {
            Some((tid, time, rest)) => event(Some(time), (tid, rest)),
            None if line.contains('@') => Line::Garbled,
            None => Line::Other,
        };
    }
    match event(None, (0, line)) {
        // Every event of interest has an underscore in its name; English sentences begin without
        // one.
        Line::Event(found) if found.name.contains('_') => Line::Event(found),
        _ => Line::Other,
    }
}

fn event(time: Option<u64>, (tid, text): (u32, &str)) -> Line<'_> {
    let (name, args) = text.split_once(' ').unwrap_or((text, ""));
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.len() > 128 || !name.chars().all(good) {
        // QEMU's own messages have timestamps, too: `... qemu-system-x86_64: warning: ...`.
        let message = name.ends_with(':') || name.contains('-');
        return if message { Line::Other } else { Line::Garbled };
    }
    if is_torn(args) {
        return Line::Garbled;
    }
    Line::Event(LogEvent {
        time,
        tid,
        name,
        args,
    })
}

/// Returns whether the arguments contain the `TID@SECONDS.MICROSECONDS:` of another line.
fn is_torn(args: &str) -> bool {
    args.match_indices('@').any(|(at, _)| {
        let before = args[..at].trim_end_matches(|c: char| c.is_ascii_digit());
        let tid = before.len();
        tid < at && tid_prefix(&args[tid..]).is_some()
    })
}

/// Parses `TID@SECONDS.MICROSECONDS:` and returns it with the rest of the line.
fn tid_prefix(line: &str) -> Option<(u32, u64, &str)> {
    let (tid, rest) = line.split_once('@')?;
    let (seconds, rest) = rest.split_once('.')?;
    let (micros, rest) = rest.split_once(':')?;
    if micros.len() != 6 {
        return None;
    }
    let tid = digits(tid)?.try_into().ok()?;
    let time = nanoseconds(digits(seconds)?, digits(micros)? * 1000)?;
    Some((tid, time, rest))
}

/// Parses digits and nothing else: `parse` alone would accept a sign.
fn digits(text: &str) -> Option<u64> {
    let all = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    all.then(|| text.parse().ok()).flatten()
}

fn nanoseconds(seconds: u64, nanos: u64) -> Option<u64> {
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

/// Parses an ISO 8601 time in UTC and returns it with the rest of the line. The time is `None` if
/// it has the form but is invalid.
fn iso_prefix(line: &str) -> Option<(Option<u64>, &str)> {
    let bytes = line.as_bytes();
    let looks = bytes.len() > 20
        && bytes[..4].iter().all(u8::is_ascii_digit)
        && bytes[4] == b'-'
        && bytes[7] == b'-'
        && bytes[10] == b'T';
    if !looks {
        return None;
    }
    let (stamp, rest) = line.split_once(' ')?;
    Some((iso(stamp), rest))
}

/// Parses `YYYY-MM-DDTHH:MM:SS[.FRACTION]Z` to nanoseconds since 1970.
fn iso(stamp: &str) -> Option<u64> {
    let (date, time) = stamp.strip_suffix('Z')?.split_once('T')?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [year, month, day] = three(date, '-')?;
    let [hour, minute, second] = three(time, ':')?;
    let within = (1970..=2500).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !within {
        return None;
    }
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    nanoseconds(seconds, fraction_ns(fraction)?)
}

fn three(text: &str, between: char) -> Option<[u64; 3]> {
    let mut parts = text.splitn(3, between).map(digits);
    Some([parts.next()??, parts.next()??, parts.next()??])
}

fn fraction_ns(text: &str) -> Option<u64> {
    let length = u32::try_from(text.len()).ok().filter(|&n| n <= 9)?;
    Some(digits(text)? * 10u64.pow(9 - length))
}

/// Gregorian calendar. Years begin with March here, so that the leap day is the last day.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let year = if month < 3 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let leap_days = year / 4 - year / 100 + year / 400;
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    365 * year + leap_days + day_of_year - 719_468
}

/// Skips the guest's name and `PROGRAM(TID:THREAD): ` if present, and returns the thread id.
fn context(rest: &str) -> (u32, &str) {
    let Some(end) = rest.find("): ").filter(|&end| end < 256) else {
        return (0, rest);
    };
    let Some(open) = rest[..end].rfind('(') else {
        return (0, rest);
    };
    let tid = rest[open + 1..end]
        .split_once(':')
        .and_then(|(tid, _)| digits(tid)?.try_into().ok());
    match tid {
        Some(tid) => (tid, &rest[end + 3..]),
        None => (0, rest),
    }
}

/// Extracts the numbers from an event's arguments in order and returns their count. Numbers beyond
/// [`NUMBERS`] are counted but not kept.
///
/// The format strings of that QEMU build are unknown here. Words that parse as numbers are numbers;
/// all others are names or strings.
pub(super) fn numbers(args: &str, out: &mut [u64; NUMBERS]) -> usize {
    let mut count = 0;
    for word in args.split([' ', ',', '=']) {
        let word = word.trim_matches(['(', ')', ';', '[', ']']);
        if let Some(number) = number(word) {
            if let Some(place) = out.get_mut(count) {
                *place = number;
            }
            count += 1;
        }
    }
    count
}

fn number(word: &str) -> Option<u64> {
    // printf's %p prints NULL as `(nil)`; the parentheses are already removed.
    if word == "nil" {
        return Some(0);
    }
    if let Some(hex) = word.strip_prefix("0x") {
        let good = !hex.starts_with('+');
        return good.then(|| u64::from_str_radix(hex, 16).ok()).flatten();
    }
    match word.strip_prefix('-') {
        Some(size) => Some(0u64.wrapping_sub(digits(size)?)),
        None => digits(word),
    }
}

/// Parses a mutex event's address, line and source file: `taken mutex 0x55d0
/// (util/thread-pool.c:91)`.
pub(super) fn mutex(args: &str) -> Option<(u64, u64, &str)> {
    let (before, place) = args.strip_suffix(')')?.rsplit_once(" (")?;
    let (file, line) = place.rsplit_once(':')?;
    let address = number(before.rsplit(' ').next()?)?;
    let plain = !file.is_empty() && file.len() <= 256;
    plain.then_some((address, digits(line)?, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(line: &str) -> LogEvent<'_> {
        match parse(line) {
            Line::Event(event) => event,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn numbers_of(args: &str) -> (Vec<u64>, usize) {
        let mut out = [0; NUMBERS];
        let count = numbers(args, &mut out);
        (out[..count.min(NUMBERS)].to_vec(), count)
    }

    #[test]
    fn every_dialect_is_read() {
        let args = "vdev 0x55 req 0x7f sector 400 nsectors 8";
        let line = format!("8440@1795222208.692542:virtio_blk_handle_read {args}");
        let event = found(&line);
        assert_eq!(
            (event.time, event.tid),
            (Some(1_795_222_208_692_542_000), 8440)
        );
        assert_eq!((event.name, event.args), ("virtio_blk_handle_read", args));

        let line = format!("virtio_blk_handle_read {args}");
        assert_eq!(found(&line).time, None);

        for (line, time, tid) in [
            (
                "2025-09-01T10:20:30.123456Z x_y a 1",
                1_756_722_030_123_456_000,
                0,
            ),
            ("2024-02-29T00:00:00Z x_y a 1", 1_709_164_800_000_000_000, 0),
            (
                "1970-01-01T00:00:00.5Z guest qemu-system-x86_64(77:IO iothread0): x_y a 1",
                500_000_000,
                77,
            ),
        ] {
            let event = found(line);
            assert_eq!((event.time, event.tid), (Some(time), tid), "{line}");
            assert_eq!((event.name, event.args), ("x_y", "a 1"));
        }
        assert_eq!(found("1@2.000003:kvm_cpu_exec ").args, "");
    }

    #[test]
    fn days_agree_with_the_calendar() {
        // Reference values from `date -u -d ... +%s`.
        for ((y, m, d), seconds) in [
            ((1970, 1, 1), 0),
            ((1972, 2, 29), 68_169_600),
            ((2000, 3, 1), 951_868_800),
            ((2100, 3, 1), 4_107_542_400),
        ] {
            assert_eq!(days_since_1970(y, m, d) * 86_400, seconds, "{y}-{m}-{d}");
        }
    }

    #[test]
    fn what_is_no_event_is_not_taken_for_one() {
        for line in [
            "",
            "Invalid access at addr 0x0, size 4",
            "qemu-system-x86_64: warning: something",
            "2025-09-01T10:20:30.123456Z qemu-system-x86_64: warning: something",
            "0x00007f: 01 02",
            "12 bytes",
        ] {
            assert_eq!(parse(line), Line::Other, "{line}");
        }
        for line in [
            "8440@1795222208.692541:virtio_pop vq 0x55Ծ806@1795222208.692542:virtio_queue_notify vdev 0x55",
            "8440@1795222208.69254:virtio_notify vdev 0x1",
            "8440@1795222208:virtio_notify vdev 0x1",
            "8440@99999999999999999999.000000:virtio_notify",
            "99999999999@1.000000:virtio_notify",
            "8440@1795222208.692542:virtio_blk_ha8440@1795222208.692543:virtio_notify 1",
            "8440@1795222208.692542:virtio_notify vdev 0x558440@1795222208.692543:virtio_pop x",
            "8440@1795222208.692542:",
            "2025-13-01T10:20:30.123456Z x_y a 1",
            "2025-09-01T10:20:30.1234567890Z x_y a 1",
        ] {
            assert_eq!(parse(line), Line::Garbled, "{line}");
        }
    }

    #[test]
    fn numbers_are_told_from_words() {
        let (got, _) = numbers_of("vdev 0x55d0 req (nil) ret -5, is_write 1");
        assert_eq!(got, [0x55d0, 0, (-5i64).cast_unsigned(), 1]);
        assert_eq!(numbers_of("cpu=3 pc=0x10 flags=+7 x7 0x 0x+1").0, [3, 0x10]);
        assert_eq!(numbers_of("1 2 3 4 5 6 7 8").1, 8);
        assert_eq!(
            mutex("taken mutex 0x7fe5 (util/thread-pool.c:91)"),
            Some((0x7fe5, 91, "util/thread-pool.c"))
        );
        assert_eq!(mutex("taken mutex 0x7fe5 (util/thread-p"), None);
        assert_eq!(mutex("taken mutex (util/thread-pool.c:91)"), None);
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(line in "\\PC*") {
            let _ = parse(&line);
            let _ = numbers_of(&line);
            let _ = mutex(&line);
        }

        #[test]
        fn a_line_that_is_cut_is_no_other_event(at in 0usize..72) {
            let line = "8440@1795222208.692542:virtio_blk_handle_read vdev 0x55 req 0x7f sector 4 n";
            if let Line::Event(event) = parse(&line[..at]) {
                prop_assert!("virtio_blk_handle_read".starts_with(event.name));
                prop_assert_eq!(event.time, Some(1_795_222_208_692_542_000));
            }
        }
    }
}
