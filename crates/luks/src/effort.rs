//! How hard new keys are to guess: the parameters of their derivation, found
//! by measuring on this machine.

use crate::error::Result;
use crate::hash::Hash;
use crate::kdf::{Kdf, MAX_MEMORY_KIB, MAX_TIME, Memory, Variant};
use std::time::{Duration, Instant};

/// What opening a new key slot may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// On one thread of this machine, about; counts for at most 30 s.
    pub time: Duration,
    /// The most memory, where memory counts; at most 1 GiB.
    pub memory_kib: u32,
}

impl Default for Effort {
    /// As in QEMU and cryptsetup: 2 s and 1 GiB.
    fn default() -> Effort {
        Effort {
            time: Duration::from_secs(2),
            memory_kib: MAX_MEMORY_KIB,
        }
    }
}

/// Fewer are never used, as in cryptsetup and QEMU.
const MIN_ITERATIONS: u32 = 1000;
/// As in cryptsetup.
const MIN_PASSES: u32 = 4;
/// As in cryptsetup.
const MIN_MEMORY_KIB: u32 = 32;
/// Shorter runs say too little about longer ones.
const MEASURED: Duration = Duration::from_millis(80);

impl Effort {
    /// PBKDF2 of `hash` for `out` bytes.
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

    /// Argon2id, with one lane, as it is run on one thread here.
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
        // KiB in all passes together.
        let total = rate * f64::from(small) * self.time().as_secs_f64();
        let mut memory = memory_of(total, most);
        // Much memory is slower than little, by its page faults among others.
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

    /// Of the digest by which a volume key is known: a sixteenth of a slot's,
    /// which is cryptsetup's 125 ms of 2 s.
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

/// Memory for the fewest passes that are `total` KiB together.
fn memory_of(total: f64, most: u32) -> u32 {
    let memory = total / f64::from(MIN_PASSES);
    memory.clamp(MIN_MEMORY_KIB.into(), most.into()) as u32
}

/// How often a second `run` does what it is told a number of, at best. Starts
/// with `first` of them; the longer `time` the better the answer.
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
