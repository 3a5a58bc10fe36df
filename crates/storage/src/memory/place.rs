//! Memory as a kind of storage.

use super::MemoryDisk;
use crate::kind::{Kind, OpenOptions, Opened, Place, size_after};
use fathom_core::DiskError;
use std::fmt;
use std::sync::Arc;

const PREFIX: &str = "memory:";

pub(crate) const KIND: Kind = Kind {
    name: "memory",
    form: "memory:SIZE",
    what: "Zeroes in memory, which can be written and are gone with the server",
    prefixes: &[PREFIX],
    options: &[],
    parse: |text| Ok(Arc::new(Of(size_after(PREFIX, text)?))),
};

/// So many bytes.
#[derive(Debug)]
struct Of(u64);

impl Place for Of {
    fn open(&self, _: &OpenOptions) -> Result<Opened, DiskError> {
        Ok(Opened::new(MemoryDisk::new(self.0)?))
    }
}

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}
