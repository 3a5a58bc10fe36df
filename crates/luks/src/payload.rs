//! The location and format of the encrypted data.

/// The scheme that determines the IV of a sector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Iv {
    /// Number added to the number of the 512-byte unit (LUKS2's `iv_tweak`).
    pub tweak: u64,
    /// Whether the IV is truncated to its low 32 bits: "plain" in dm-crypt; otherwise "plain64".
    pub narrow: bool,
}

impl Iv {
    /// Returns the IV of the 512-byte unit number `unit` of the payload.
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
    /// Offset of the payload in bytes from the start of the header.
    pub offset: u64,
    /// Size of the payload in bytes; `None` if the payload extends to the end of the disk.
    pub size: Option<u64>,
    /// Sector size in bytes: 512, 1024, 2048 or 4096.
    pub sector_size: u32,
    /// IV scheme for [`Sectors::with_iv`](crate::Sectors::with_iv).
    pub iv: Iv,
    /// Size of the volume key in bytes: 32 or 64.
    pub key_bytes: usize,
}
