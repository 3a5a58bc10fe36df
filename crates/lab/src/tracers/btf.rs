//! Offsets of members of the kernel's structures, from its own type information
//! (Documentation/bpf/btf.rst).

use std::path::Path;

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;

/// Returns the offset in bytes of a structure's member in the running kernel. Returns `None` if the
/// kernel has no type information, no such structure or no such member.
pub(crate) fn member_offset(structure: &str, member: &str) -> Option<usize> {
    let bytes = std::fs::read(Path::new("/sys/kernel/btf/vmlinux")).ok()?;
    find(&bytes, structure, member)
}

fn find(bytes: &[u8], structure: &str, member: &str) -> Option<usize> {
    let btf = Btf::parse(bytes)?;
    let mut at = 0;
    while let Some([name, info, _]) = btf.words(at) {
        let (kind, count) = (info >> 24 & 31, (info & 0xffff) as usize);
        if kind == KIND_STRUCT && btf.name(name) == Some(structure.as_bytes()) {
            return btf.member(at + 12, count, info >> 31 == 1, member);
        }
        at += 12 + extra(kind, count)?;
    }
    None
}

/// The types and strings sections of a BTF file.
struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
}

impl<'a> Btf<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Btf<'a>> {
        let word = |at: usize| {
            let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(bytes) as usize)
        };
        if bytes.get(..2)? != MAGIC.to_le_bytes() {
            return None;
        }
        let body = bytes.get(word(4)?..)?;
        let section = |at: usize| {
            let start = word(at)?;
            body.get(start..start.checked_add(word(at + 4)?)?)
        };
        Some(Btf {
            types: section(8)?,
            strings: section(16)?,
        })
    }

    /// Returns three words of the types section: the header of a type, or a member.
    fn words(&self, at: usize) -> Option<[u32; 3]> {
        let bytes = self.types.get(at..at.checked_add(12)?)?;
        let (words, _) = bytes.as_chunks::<4>();
        Some(std::array::from_fn(|i| u32::from_le_bytes(words[i])))
    }

    fn name(&self, at: u32) -> Option<&'a [u8]> {
        let rest = self.strings.get(at as usize..)?;
        rest.split(|&byte| byte == 0).next()
    }

    fn member(&self, at: usize, count: usize, has_sizes: bool, wanted: &str) -> Option<usize> {
        (0..count).find_map(|index| {
            let [name, _, offset] = self.words(at + index * 12)?;
            // With the flag set, the upper 8 bits are the size of a bit field.
            let bits = if has_sizes {
                offset & 0xff_ffff
            } else {
                offset
            };
            let is_wanted = self.name(name)? == wanted.as_bytes() && bits % 8 == 0;
            is_wanted.then_some(bits as usize / 8)
        })
    }
}

/// Returns the number of bytes after the three header words of a type, or `None` for an unknown
/// kind.
fn extra(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        2 | 7..=12 | 16 | 18 => 0,
        1 | 14 | 17 => 4,
        3 => 12,
        4 | 5 | 15 | 19 => count * 12,
        6 | 13 => count * 8,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An int, then `struct eventfd_ctx { int count; int id; }`.
    fn sample() -> Vec<u8> {
        let strings = b"\0int\0eventfd_ctx\0count\0id\0";
        let types: [u32; 13] = [
            1,
            1 << 24,
            4,
            32, // INT with its encoding
            5,
            4 << 24 | 2,
            48, // STRUCT of two members
            17,
            1,
            0,
            23,
            1,
            44 * 8,
        ];
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend([1, 0]);
        let sizes = [
            24,
            0,
            types.len() as u32 * 4,
            types.len() as u32 * 4,
            strings.len() as u32,
        ];
        bytes.extend(
            sizes
                .iter()
                .chain(&types)
                .flat_map(|word| word.to_le_bytes()),
        );
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn members_are_found_behind_other_types() {
        assert_eq!(find(&sample(), "eventfd_ctx", "id"), Some(44));
        assert_eq!(find(&sample(), "eventfd_ctx", "count"), Some(0));
        assert_eq!(find(&sample(), "eventfd_ctx", "flags"), None);
        assert_eq!(find(&sample(), "eventfd", "id"), None);
    }

    proptest! {
        #[test]
        fn no_file_is_too_strange(at in 0usize..200, value: u8, cut in 0usize..200) {
            let mut bytes = sample();
            let length = bytes.len();
            bytes[at % length] = value;
            bytes.truncate(length - cut % length);
            let _ = find(&bytes, "eventfd_ctx", "id");
        }
    }

    /// If the kernel has type information, a structure with a known layout shows that it is parsed
    /// correctly.
    #[test]
    fn the_running_kernel_agrees() {
        if Path::new("/sys/kernel/btf/vmlinux").exists() {
            assert_eq!(member_offset("timespec64", "tv_nsec"), Some(8));
            assert!(member_offset("eventfd_ctx", "id").is_some());
        }
    }
}
