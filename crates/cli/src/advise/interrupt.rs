//! Signals that end the command.

use anyhow::{Context, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a wait checks whether a signal has arrived.
const STEP: Duration = Duration::from_millis(50);

/// Whether SIGINT, SIGTERM or SIGHUP has arrived. The signals do not end the process: the command
/// first gives the disk its options back.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches the signals from now on.
    pub fn catch() -> anyhow::Result<Interrupt> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, flag.clone()).context("cannot catch signals")?;
        }
        Ok(Interrupt(flag))
    }

    pub fn has_arrived(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Fails if a signal has arrived.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.has_arrived() {
            true => bail!("interrupted"),
            false => Ok(()),
        }
    }

    /// Waits for `time`, or until a signal arrives.
    pub fn sleep(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.has_arrived() {
            match until.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return,
                left => thread::sleep(left.min(STEP)),
            }
        }
    }
}
