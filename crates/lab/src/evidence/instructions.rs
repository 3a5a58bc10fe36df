//! Counts the CPU instructions for the disk, in the guest and in the disk's server. The CPUs must
//! support it, which most cloud machines do not. An unshared counter costs nothing, so the whole
//! window is counted.

use fathom_run::evidence::Instructions;
use perf_event::Builder;
use perf_event::events::Hardware;

use super::counters::Counters;
use super::threads::Threads;

/// Counts from [`Count::begin`] to [`Count::end`].
pub struct Count {
    guest: Option<Counters>,
    server: Option<Counters>,
}

impl Count {
    pub fn begin(threads: &Threads) -> Count {
        // The guest's vCPUs, while they run guest code.
        let mut guest = Builder::new(Hardware::INSTRUCTIONS);
        guest.include_kernel().exclude_host(true);
        let mut server = Builder::new(Hardware::INSTRUCTIONS);
        server.include_kernel();
        let counters = |counters: std::io::Result<_>| counters.ok().flatten();
        Count {
            guest: counters(Counters::begin(&mut guest, threads.vcpus())),
            server: counters(Counters::begin(&mut server, threads.serving())),
        }
    }

    /// Returns the counts, or `None` if nothing was counted.
    pub fn end(self) -> Option<Instructions> {
        let counted = |counters: Option<Counters>| counters?.counted().ok();
        let found = Instructions {
            // An emulated guest has no count of its own: the CPUs execute the code that QEMU
            // translates.
            guest: counted(self.guest).filter(|count| *count > 0),
            server: counted(self.server),
        };
        (found != Instructions::default()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::path::Path;

    use super::*;
    use crate::evidence::{Kind, Watched};

    #[test]
    fn instructions_are_counted_where_the_cpus_can() {
        let mut threads = Threads::new(vec![Watched::new(std::process::id(), Kind::Server)]);
        threads.look();
        let count = Count::begin(&threads);
        (0..1_000_000_u64).for_each(|number| {
            black_box(number);
        });
        let found = count.end();
        let pmus = ["cpu", "cpu_core", "armv8_pmuv3_0"];
        let has = |name: &&str| {
            Path::new("/sys/bus/event_source/devices")
                .join(name)
                .exists()
        };
        // SAFETY: no arguments.
        let is_root = unsafe { libc::geteuid() } == 0;
        match found.and_then(|found| found.server) {
            Some(count) => assert!(count >= 1_000_000, "{count}"),
            None => assert!(!is_root || !pmus.iter().any(has)),
        }
        assert_eq!(found.and_then(|found| found.guest), None);
    }
}
