//! Where the encrypted data is and how it is to be read.

/// Which IV a sector has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Iv {
    /// What is added to the number of the unit of 512 bytes (LUKS2's
    /// `iv_tweak`).
    pub tweak: u64,
    /// Only the low 32 bits count, which dm-crypt calls plain; otherwise it
    /// is plain64.
    pub narrow: bool,
}

impl Iv {
    /// Of the unit of 512 bytes with the number `unit` in the payload.
    pub(crate) fn of_unit(self, unit: u64) -> u64 {
        let iv = unit.wrapping_add(self.tweak);
        match self.narrow {
            true => iv & u64::from(u32::MAX),
            false => iv,
        }
    }
}

/// The payload of a LUKS header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Bytes from the header's start to the payload's.
    pub offset: u64,
    /// Its bytes; `None` for all that follows.
    pub size: Option<u64>,
    /// 512, 1024, 2048 or 4096.
    pub sector_size: u32,
    /// For [`Sectors::with_iv`](crate::Sectors::with_iv).
    pub iv: Iv,
    /// Bytes of the volume key: 32 or 64.
    pub key_bytes: usize,
}
