//! Limits how much of this process's address space a front-end may use.
//!
//! A mapping costs a front-end nothing: a sparse file may have any size, and memory may consist of
//! any number of pieces. A process that runs out of addresses or mappings (vm.max_map_count) can no
//! longer allocate anything, for any of its disks. Therefore all front-ends together leave some of
//! both to the process. Each front-end also has a share, so that it cannot exhaust what the others
//! need.

use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;
use std::sync::Arc;

/// Maximum number of memory regions of one front-end; QEMU has at most 509 memory slots.
const MAX_SLOTS: usize = 509;

/// Minimum number of memory regions that every front-end can have.
const MIN_SLOTS: usize = 8;

/// Number of mappings besides memory regions: the dirty log and the in-flight area, each with its
/// replacement.
const OTHERS: usize = 4;

/// The kernel's default of vm.max_map_count.
const DEFAULT_MAP_COUNT: usize = 65_530;

/// Why a mapping is refused.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    #[error(
        "its {bytes} bytes exceed the limit of {limit} for this disk's front-end; serve fewer \
         disks in one process"
    )]
    Bytes { bytes: u64, limit: u64 },
    #[error(
        "more than {limit} mappings for this disk's front-end; serve fewer disks in one process"
    )]
    Mappings { limit: usize },
    #[error(
        "the front-ends of all disks have mapped all addresses of this process; serve some of \
         the disks by another process"
    )]
    All,
}

/// An amount of mapped memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amount {
    bytes: u64,
    mappings: usize,
}

impl Amount {
    fn plus(self, bytes: u64) -> Amount {
        Amount {
            bytes: self.bytes.saturating_add(bytes),
            mappings: self.mappings + 1,
        }
    }

    fn minus(self, bytes: u64) -> Amount {
        Amount {
            bytes: self.bytes - bytes,
            mappings: self.mappings - 1,
        }
    }

    fn fits(self, limit: Amount) -> bool {
        self.bytes <= limit.bytes && self.mappings <= limit.mappings
    }
}

/// Totals of all front-ends of this process.
struct All {
    shares: usize,
    taken: Amount,
}

static ALL: Mutex<All> = Mutex::new(All {
    shares: 0,
    taken: Amount {
        bytes: 0,
        mappings: 0,
    },
});

fn all() -> MutexGuard<'static, All> {
    ALL.lock()
}

/// Limits of this process and this machine.
#[derive(Clone, Copy, Debug)]
struct Host {
    /// Number of bytes that can be mapped.
    address_space: u64,
    /// Maximum number of mappings (vm.max_map_count).
    map_count: usize,
    /// Memory and swap space in bytes.
    memory: u64,
}

impl Host {
    fn find() -> Host {
        // Stacks lie at the end of the address space, or half way to it.
        let here = 0u8;
        let addresses = (&raw const here).addr().checked_next_power_of_two();
        let limit = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
        let map_count = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let map_count = map_count.ok().and_then(|text| text.trim().parse().ok());
        let info = sysinfo();
        Host {
            address_space: limit.min(addresses.unwrap_or(usize::MAX) as u64),
            map_count: map_count.unwrap_or(DEFAULT_MAP_COUNT),
            memory: (info.totalram + info.totalswap).saturating_mul(info.mem_unit.into()),
        }
    }

    /// Returns the limit of all front-ends together.
    ///
    /// A guarded mapping becomes two when its file is truncated; half of the mappings are reserved
    /// for the process itself.
    fn for_all(&self) -> Amount {
        Amount {
            bytes: self.address_space / 4 * 3,
            mappings: self.map_count / 4,
        }
    }

    /// Returns the number of memory regions that each of `shares` front-ends may have.
    fn slots(&self, shares: usize) -> usize {
        let each = self.for_all().mappings / shares.max(1);
        (each.saturating_sub(OTHERS) / 2).clamp(MIN_SLOTS, MAX_SLOTS)
    }

    /// Returns the limit of each of `shares` front-ends.
    ///
    /// The bytes are an equal part of the total, or twice the memory of this host if that is more.
    /// Memory and slots count twice, because a new table of regions is mapped before the old one is
    /// unmapped.
    fn for_each(&self, shares: usize) -> Amount {
        let equal = self.for_all().bytes / shares.max(1) as u64;
        Amount {
            bytes: equal.max(self.memory.saturating_mul(2)),
            mappings: 2 * self.slots(shares) + OTHERS,
        }
    }
}

/// The part of the address space for one disk's front-end.
pub struct Share {
    host: Host,
    taken: Mutex<Amount>,
}

impl Share {
    /// Registers another front-end.
    pub fn new() -> Arc<Share> {
        all().shares += 1;
        Arc::new(Share {
            host: Host::find(),
            taken: Mutex::default(),
        })
    }

    /// Returns the number of memory regions that the front-end may have at once.
    pub fn slots(&self) -> usize {
        self.host.slots(all().shares)
    }

    /// Counts a mapping of `bytes` against the share and the total.
    pub fn take(self: &Arc<Share>, bytes: u64) -> Result<Taken, ShareError> {
        let mut all = all();
        let mut own = self.taken.lock();
        let (own_sum, sum) = (own.plus(bytes), all.taken.plus(bytes));
        let limit = self.host.for_each(all.shares);
        if own_sum.bytes > limit.bytes {
            let limit = limit.bytes;
            return Err(ShareError::Bytes { bytes, limit });
        }
        if own_sum.mappings > limit.mappings {
            let limit = limit.mappings;
            return Err(ShareError::Mappings { limit });
        }
        if !sum.fits(self.host.for_all()) {
            return Err(ShareError::All);
        }
        *own = own_sum;
        all.taken = sum;
        Ok(Taken {
            share: self.clone(),
            bytes,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        all().shares -= 1;
    }
}

/// A counted mapping. Must be dropped after unmapping.
pub struct Taken {
    share: Arc<Share>,
    bytes: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut all = all();
        let mut own = self.share.taken.lock();
        *own = own.minus(self.bytes);
        all.taken = all.taken.minus(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: u64 = 1 << 40;

    fn host(memory: u64) -> Host {
        Host {
            address_space: 128 * TIB,
            map_count: DEFAULT_MAP_COUNT,
            memory,
        }
    }

    #[test]
    fn equal_parts_fit_and_leave_a_quarter() {
        for shares in [1, 2, 3, 18, 100, 800] {
            let host = host(TIB / 64);
            let each = host.for_each(shares);
            assert!(each.bytes * shares as u64 <= 96 * TIB, "{shares}");
            assert!(each.mappings * shares <= DEFAULT_MAP_COUNT / 4, "{shares}");
            assert!(host.slots(shares) >= 8);
        }
        assert_eq!(host(TIB).slots(15), 509);
    }

    #[test]
    fn a_guest_as_large_as_the_host_has_room_beside_many_disks() {
        assert_eq!(host(4 * TIB).for_each(1000).bytes, 8 * TIB);
    }

    #[test]
    fn this_host_has_more_addresses_than_memory() {
        let host = Host::find();
        assert!(host.address_space > 2 * host.memory, "{host:?}");
        assert!(host.memory > 1 << 24, "{host:?}");
    }
}
