//! Parses `/proc/PID/maps`, the memory map of a process.

use std::ops::Range;

/// A mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Map {
    range: Range<u64>,
    /// Offset in the file, in bytes.
    offset: u64,
    /// A path, `[heap]`, `[stack]`, or empty.
    name: String,
}

/// Location of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In a file. `base` is the address at which the file's first byte is or would be mapped.
    File { path: String, base: u64 },
    /// `offset` bytes into other memory.
    Other { kind: String, offset: u64 },
}

/// Parses all mappings in order. Invalid lines are skipped.
pub(super) fn parse(text: &str) -> Vec<Map> {
    text.lines().filter_map(line).collect()
}

/// Parses `START-END PERMISSIONS OFFSET DEVICE INODE [NAME]`. The name follows blanks.
fn line(line: &str) -> Option<Map> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let offset = hex(words.nth(1)?)?;
    let name = words.nth(2).unwrap_or("").trim_start();
    Some(Map {
        range: hex(start)?..hex(end)?,
        offset,
        name: name.to_owned(),
    })
}

/// Returns the location of an address, or `None` if it is not mapped.
pub(super) fn place(maps: &[Map], address: u64) -> Option<Place> {
    let index = maps.iter().position(|map| map.range.contains(&address))?;
    let map = &maps[index];
    // A program's zero-initialised variables are in anonymous memory directly after the file's
    // mapping.
    let before = index.checked_sub(1).map(|i| &maps[i]);
    let is_rest = |before: &&Map| map.name.is_empty() && before.range.end == map.range.start;
    let owner = before
        .filter(is_rest)
        .filter(|map| is_file(&map.name))
        .unwrap_or(map);
    if is_file(&owner.name) {
        let first = maps.iter().find(|map| map.name == owner.name)?;
        return Some(Place::File {
            path: owner.name.clone(),
            base: first.range.start.wrapping_sub(first.offset),
        });
    }
    let kind = match map.name.as_str() {
        "" => "anonymous memory",
        name => name.trim_matches(['[', ']']),
    };
    Some(Place::Other {
        kind: kind.to_owned(),
        offset: address - map.range.start,
    })
}

/// Returns whether the name is a file that can be opened: shared memory and deleted files cannot.
fn is_file(name: &str) -> bool {
    let other = name.starts_with("/memfd:") || name.starts_with("/dev/");
    name.starts_with('/') && !other && !name.ends_with(" (deleted)")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00400000-00401000 r--p 00000000 fe:00 12    /usr/bin/a program
00401000-00402000 r-xp 00001000 fe:00 12    /usr/bin/a program
00404000-00405000 rw-p 00003000 fe:00 12    /usr/bin/a program
00405000-00407000 rw-p 00000000 00:00 0
01000000-01021000 rw-p 00000000 00:00 0     [heap]
7f0000000000-7f0000001000 rw-s 00000000 00:01 7    /memfd:memory (deleted)
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
nonsense
";

    fn at(address: u64) -> Option<Place> {
        place(&parse(MAPS), address)
    }

    #[test]
    fn addresses_are_found_in_files_behind_them_and_elsewhere() {
        let file = Some(Place::File {
            path: "/usr/bin/a program".into(),
            base: 0x40_0000,
        });
        for address in [0x40_0000, 0x40_1fff, 0x40_4060, 0x40_6fff] {
            assert_eq!(at(address), file, "{address:#x}");
        }
        let other = |kind: &str, offset| {
            let kind = kind.to_owned();
            Some(Place::Other { kind, offset })
        };
        assert_eq!(at(0x0100_0010), other("heap", 0x10));
        assert_eq!(at(0x7f00_0000_1004), other("anonymous memory", 4));
        assert_eq!(at(0x7f00_0000_0004), other("/memfd:memory (deleted)", 4));
        assert_eq!(at(0x40_3000), None);
    }
}
