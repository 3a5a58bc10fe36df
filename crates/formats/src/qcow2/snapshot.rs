//! The snapshot table.

use super::bytes::{printable, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::{Error, HostOffset, Result};

/// Length of an entry's fixed part in bytes, before the extra data.
pub const FIXED_LEN: usize = 40;
/// Maximum length of the extra data in bytes that QEMU accepts.
pub const MAX_EXTRA: usize = 1024;
/// Minimum length of the extra data in bytes in version 3.
pub const LEAST_EXTRA_V3: usize = 16;
/// Value of the instruction count field when there is no instruction count.
pub const NO_ICOUNT: u64 = u64::MAX;
/// Maximum length of an entry in bytes: fixed part, extra data, ID, name and padding.
pub const MAX_ENTRY: usize = FIXED_LEN + MAX_EXTRA + 2 * 65535 + 8;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Where the snapshot's L1 table starts.
    pub l1_offset: HostOffset,
    /// Number of entries of that L1 table.
    pub l1_entries: u32,
    /// The snapshot's ID, unique in the image.
    pub id: Vec<u8>,
    /// The snapshot's name, chosen by the user.
    pub name: Vec<u8>,
    /// The time of the snapshot: seconds since the epoch, and nanoseconds.
    pub date: (u32, u32),
    /// Time that the guest had run before the snapshot, in nanoseconds.
    pub vm_clock: u64,
    /// The 32-bit size of the VM state in bytes. A size in the extra data overrides this field.
    pub vm_state_size_32: u32,
    /// Extra data, with known and unknown fields. The accessors read the known ones.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// Parses the entry at the start of `bytes`. Also returns the length of the entry in bytes.
    /// `bytes` has [`MAX_ENTRY`] bytes, or all that remain up to the table's size limit.
    pub fn parse(bytes: &[u8]) -> Result<(Snapshot, usize)> {
        let cut = || Error::invalid("its snapshot table is truncated or too large");
        let fixed = bytes.get(..FIXED_LEN).ok_or_else(cut)?;
        let extra_len = u32_at(fixed, 36) as usize;
        if extra_len > MAX_EXTRA {
            return Err(Error::invalid(format!(
                "a snapshot has {extra_len} bytes of extra data, more than {MAX_EXTRA}"
            )));
        }
        let mut rest = &bytes[FIXED_LEN..];
        let mut take = |len: usize| {
            let (head, tail) = rest.split_at_checked(len).ok_or_else(cut)?;
            rest = tail;
            Ok(head.to_vec())
        };
        let extra = take(extra_len)?;
        let id = take(u16_at(fixed, 12).into())?;
        let name = take(u16_at(fixed, 14).into())?;
        let len = FIXED_LEN + extra.len() + id.len() + name.len();
        let snapshot = Snapshot {
            l1_offset: HostOffset(u64_at(fixed, 0)),
            l1_entries: u32_at(fixed, 8),
            id,
            name,
            date: (u32_at(fixed, 16), u32_at(fixed, 20)),
            vm_clock: u64_at(fixed, 24),
            vm_state_size_32: u32_at(fixed, 32),
            extra,
        };
        Ok((snapshot, len.next_multiple_of(8)))
    }

    /// Appends the entry, padded to a multiple of 8 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let mut fixed = [0; FIXED_LEN];
        put_u64(&mut fixed, 0, self.l1_offset.0);
        put_u32(&mut fixed, 8, self.l1_entries);
        fixed[12..14].copy_from_slice(&(self.id.len() as u16).to_be_bytes());
        fixed[14..16].copy_from_slice(&(self.name.len() as u16).to_be_bytes());
        put_u32(&mut fixed, 16, self.date.0);
        put_u32(&mut fixed, 20, self.date.1);
        put_u64(&mut fixed, 24, self.vm_clock);
        put_u32(&mut fixed, 32, self.vm_state_size_32);
        put_u32(&mut fixed, 36, self.extra.len() as u32);
        out.extend(fixed);
        out.extend(&self.extra);
        out.extend(&self.id);
        out.extend(&self.name);
        let len = (out.len() - start).next_multiple_of(8);
        out.resize(start + len, 0);
    }

    fn extra_u64(&self, at: usize) -> Option<u64> {
        (self.extra.len() >= at + 8).then(|| u64_at(&self.extra, at))
    }

    /// Size of the saved VM state in bytes.
    pub fn vm_state_size(&self) -> u64 {
        self.extra_u64(0).unwrap_or(self.vm_state_size_32.into())
    }

    /// The disk's size in bytes at the time of the snapshot, if the entry has that field.
    pub fn disk_size(&self) -> Option<u64> {
        self.extra_u64(8)
    }

    /// The instruction count for record and replay, if there is one.
    pub fn icount(&self) -> Option<u64> {
        self.extra_u64(16).filter(|n| *n != NO_ICOUNT)
    }

    /// Returns the ID and name for messages, each cut to 64 bytes.
    pub fn shown(&self) -> String {
        let start = |text: &[u8]| printable(&text[..text.len().min(64)]);
        format!("{} ({})", start(&self.id), start(&self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_they_were_written() {
        let mut extra = Vec::new();
        for number in [1u64 << 40, 1 << 30, u64::MAX] {
            extra.extend(number.to_be_bytes());
        }
        extra.extend([1, 2, 3]);
        let snapshot = Snapshot {
            l1_offset: HostOffset(0x50000),
            l1_entries: 3,
            id: b"1".to_vec(),
            name: "schnappschuß".into(),
            date: (1_600_000_000, 5),
            vm_clock: 77,
            vm_state_size_32: 9,
            extra,
        };
        let mut bytes = Vec::new();
        snapshot.encode(&mut bytes);
        let len = bytes.len();
        bytes.extend([0xff; 100]);
        assert_eq!(Snapshot::parse(&bytes).unwrap(), (snapshot.clone(), len));
        assert_eq!(snapshot.vm_state_size(), 1 << 40);
        assert_eq!(snapshot.disk_size(), Some(1 << 30));
        assert_eq!(snapshot.icount(), None);
        for cut in 0..len - 8 {
            assert!(Snapshot::parse(&bytes[..cut]).is_err());
        }
        bytes[38] = 5;
        assert!(Snapshot::parse(&bytes).is_err());
    }
}
