//! A disk in this process's memory.

mod map;
mod part;

use crate::kind::{Kind, OfSize, Opened, PART};
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Part, PartState, RangeLimits, RequestId, Resize, Stage,
};
use map::Map;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

const PREFIX: &str = "memory:";

pub(crate) const KIND: Kind = Kind {
    name: "memory",
    form: "memory:SIZE",
    what: "Memory of the server: begins as zeroes, and is lost when the server ends",
    prefixes: &[PREFIX],
    images: false,
    network: false,
    locks: false,
    options: &[],
    parse: |text| {
        OfSize::parse(PREFIX, text, |size, options| {
            open(size, options.handover_state.take(PART))
        })
    },
};

fn open(size: u64, early_state: Option<PartState>) -> Result<Opened, DiskError> {
    let disk = match early_state {
        Some(early_state) => MemoryDisk::of(early_state)?,
        None => MemoryDisk::new(size)?,
    };
    let memory = Arc::new(Memory(disk.map.clone()));
    Ok(Opened {
        part: Some(memory),
        ..Opened::new(disk)
    })
}

/// Provides the memory to a successor, as the disk's handover state.
struct Memory(Arc<Map>);

impl Part for Memory {
    fn early_state(&self) -> io::Result<Option<PartState>> {
        self.0.early_state().map(Some)
    }
}

/// Limits for storage that accepts ranges of any length.
const ANY_RANGE: RangeLimits = RangeLimits {
    alignment: 4096,
    max_len: 1 << 40,
};

/// Returns the properties of a disk of `size` bytes whose data does not outlive the process.
pub(crate) fn volatile(size: u64) -> DiskInfo {
    DiskInfo {
        size,
        block_size: 512,
        physical_block_size: 4096,
        optimal_io_size: 0,
        read_only: false,
        write_cache: false,
        discard: Some(ANY_RANGE),
        write_zeroes: Some(ANY_RANGE),
    }
}

/// A disk in memory, lost when the process ends. Pages are allocated by the first write and freed
/// by discards.
pub struct MemoryDisk {
    map: Arc<Map>,
}

impl MemoryDisk {
    /// Makes a disk of `size` bytes, rounded down to a multiple of 512. Fails when the memory
    /// cannot be mapped, or when the size is 0.
    pub fn new(size: u64) -> Result<MemoryDisk, DiskError> {
        let size = size & !511;
        if size == 0 {
            return Err(DiskError::Unusable {
                path: name(size),
                problem: "a disk needs at least 512 bytes".into(),
            });
        }
        let map = Map::new(size).map_err(unmapped(size))?;
        Ok(MemoryDisk { map: Arc::new(map) })
    }

    /// Makes a disk of the memory that a predecessor shares.
    fn of(early_state: PartState) -> Result<MemoryDisk, DiskError> {
        let map = Map::of(early_state).map_err(|problem| DiskError::Unusable {
            path: PREFIX.into(),
            problem,
        })?;
        Ok(MemoryDisk { map: Arc::new(map) })
    }
}

fn name(size: u64) -> PathBuf {
    PathBuf::from(format!("memory:{size}"))
}

fn unmapped(size: u64) -> impl FnOnce(std::io::Error) -> DiskError {
    move |source| DiskError::Io {
        path: name(size),
        what: "cannot map enough memory",
        source,
    }
}

impl Disk for MemoryDisk {
    fn info(&self) -> DiskInfo {
        volatile(self.map.len())
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let now = self.map.len();
        let size = to.named(now)?;
        if size < now {
            self.map.set_len(size);
            (to.settle)().inspect_err(|_| self.map.set_len(now))?;
            // Bytes that a later resize brings back must read as zeroes.
            self.map.clear(size..now);
        } else {
            self.map.grow(size).map_err(unmapped(size))?;
            self.map.set_len(size);
        }
        Ok(size)
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(MemoryChannel {
            map: self.map.clone(),
        }))
    }
}

struct MemoryChannel {
    map: Arc<Map>,
}

impl Channel for MemoryChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let done = self.map.serve(&cx.slab[id]);
        // The next request of the batch begins at this tick.
        cx.tick();
        cx.complete(id, done.err().unwrap_or(0));
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {
        unreachable!("it pushes no I/O");
    }
}
