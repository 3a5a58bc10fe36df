//! Chooses the key derivation parameters of new keys by measuring this machine.
//!
//! The parameters determine how expensive it is to guess a passphrase.

use crate::error::Result;
use crate::hash::Hash;
use crate::kdf::{Kdf, MAX_MEMORY_KIB, MAX_TIME, Memory, Variant};
use std::time::{Duration, Instant};

/// Time and memory that opening a new key slot may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Approximate time on one thread of this machine. Values above 30 s are treated as 30 s.
    pub time: Duration,
    /// Maximum memory in KiB for memory-hard key derivation; at most 1 GiB.
    pub memory_kib: u32,
}

impl Default for Effort {
    /// The defaults of QEMU and cryptsetup: 2 s and 1 GiB.
    fn default() -> Effort {
        Effort {
            time: Duration::from_secs(2),
            memory_kib: MAX_MEMORY_KIB,
        }
    }
}

/// Minimum number of PBKDF2 iterations, as in cryptsetup and QEMU.
const MIN_ITERATIONS: u32 = 1000;
/// Minimum number of Argon2 passes, as in cryptsetup.
const MIN_PASSES: u32 = 4;
/// Minimum memory of Argon2 in KiB, as in cryptsetup.
const MIN_MEMORY_KIB: u32 = 32;
/// Duration of a measurement that is long enough to predict longer runs.
const MEASURED: Duration = Duration::from_millis(80);

impl Effort {
    /// Chooses PBKDF2 parameters for `hash` and a key of `out` bytes.
    pub(crate) fn pbkdf2(&self, hash: Hash, out: usize) -> Kdf {
        let rate = rate(self.time(), MIN_ITERATIONS, |iterations| {
            hash.pbkdf2(b"passphrase", &[0x5a; 32], iterations, &mut vec![0; out]);
        });
        let most = MAX_TIME.as_secs_f64() / 2.0;
        let one = Kdf::Pbkdf2 {
            hash,
            iterations: 1,
        };
        let most = most / one.time(out).as_secs_f64();
        let iterations = (rate * self.time().as_secs_f64()).min(most) as u32;
        Kdf::Pbkdf2 {
            hash,
            iterations: iterations.max(MIN_ITERATIONS),
        }
    }

    /// Chooses Argon2id parameters for a key of `out` bytes, with one lane.
    ///
    /// A single lane suffices because Fathom runs Argon2 on one thread.
    pub(crate) fn argon2id(&self, out: usize) -> Result<Kdf> {
        let kdf = |passes, memory_kib| Kdf::Argon2 {
            variant: Variant::Id,
            passes,
            memory_kib,
            lanes: 1,
        };
        let most = self.memory_kib.clamp(MIN_MEMORY_KIB, MAX_MEMORY_KIB);
        let run = |passes, memory| {
            kdf(passes, memory).derive(b"passphrase", &[0x5a; 32], &mut vec![0; out])
        };
        let small = most.min(32 << 10);
        let mut failed = Ok(());
        let rate = rate(self.time(), 1, |passes| {
            if failed.is_ok() {
                failed = run(passes, small);
            }
        });
        failed?;
        // Total KiB that all passes together process in the given time.
        let total = rate * f64::from(small) * self.time().as_secs_f64();
        let mut memory = memory_of(total, most);
        // A large memory is slower per KiB than a small one, for example because of page faults. A
        // pass over the full memory corrects the estimate.
        if memory > small {
            let bare = timed(|| Memory::new(memory as usize).map(drop))?;
            let pass = timed(|| run(1, memory))?.saturating_sub(bare);
            let took = bare + pass * MIN_PASSES;
            let share = self.time().as_secs_f64() / took.as_secs_f64();
            memory = memory_of(total.min(f64::from(memory * MIN_PASSES) * share), most);
        }
        let passes = match memory == most {
            true => (total / f64::from(memory)) as u32,
            false => MIN_PASSES,
        };
        Ok(kdf(passes.max(MIN_PASSES), memory))
    }

    /// Chooses PBKDF2 parameters for the digest that identifies a volume key.
    ///
    /// The digest takes a sixteenth of a slot's time: cryptsetup's 125 ms of 2 s.
    pub(crate) fn digest(&self, hash: Hash, out: usize) -> Kdf {
        let time = self.time() / 16;
        Effort { time, ..*self }.pbkdf2(hash, out)
    }

    fn time(&self) -> Duration {
        self.time.min(MAX_TIME / 2)
    }
}

fn timed(run: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed())
}

/// Returns the memory in KiB for the minimum number of passes over `total` KiB altogether.
///
/// The result is at least [`MIN_MEMORY_KIB`] and at most `most`.
fn memory_of(total: f64, most: u32) -> u32 {
    let memory = total / f64::from(MIN_PASSES);
    memory.clamp(MIN_MEMORY_KIB.into(), most.into()) as u32
}

/// Measures how many units of work per second `run` completes at best.
///
/// `run` receives the number of units to do, at first `first`. The number doubles until one run
/// takes long enough. A longer `time` gives a more precise result.
fn rate(time: Duration, first: u32, mut run: impl FnMut(u32)) -> f64 {
    let enough = MEASURED.min(time / 4);
    let mut best = 0f64;
    let mut count = first;
    loop {
        let start = Instant::now();
        run(count);
        let took = start.elapsed();
        best = best.max(f64::from(count) / took.as_secs_f64().max(1e-9));
        if took >= enough {
            return best;
        }
        count = count.saturating_mul(2);
    }
}
