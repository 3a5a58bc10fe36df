//! Situations that are built on purpose, and laws of the rules for any evidence.

mod laws;
mod situations;

use crate::evidence::{Engine, Evidence, Host, OwnThreads, Polling, Storage, Threads, Verdict};

/// Returns a disk of 1 TiB with one thread, which is not limited by anything that was seen.
fn disk(verdict: Verdict) -> Evidence {
    Evidence {
        verdict,
        size: 1 << 40,
        storage: Storage::File,
        mean_us: 100.0,
        map: 0.0,
        device: 0.6,
        in_flight: 1.0,
        reads: 1.0,
        forward: None,
        threads: Threads::Own(own()),
        tables: None,
        filters: Vec::new(),
        host: Host {
            free_cpus: 4.0,
            free_memory: 8 << 30,
        },
    }
}

fn own() -> OwnThreads {
    OwnThreads {
        count: 1,
        cpu: 0.3,
        pinned: None,
        sources: 1,
        polling: Polling::Auto,
        sleeps: 1.0,
        engine: Engine::IoUring,
    }
}
