//! A disk image served by workers without threads, on files in memory. A seed determines all events
//! and their order.
//!
//! A [`case`] is an image created by QEMU or Fathom. The case's files are in a [`world`], whose
//! operations wait until the [`run`] executes one of them, in any order. The image uses these files
//! as its storages through a [`recorder`]. The run's [`worker`]s submit requests that [`rng`]
//! chooses, and the [`model`] says what each sector may contain. [`cut`] creates the files that a
//! power cut may leave from the world's log. A [`bitmap`] in the image records the changes. A
//! [`saved_state`] is the in-flight state that a killed server leaves to its successor in addition
//! to the files.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod bitmap;
pub mod case;
pub mod cut;
pub mod matrix;
pub mod model;
pub mod pages;
pub mod recorder;
pub mod resizing;
pub mod rng;
pub mod run;
pub mod saved_state;
pub mod side_view;
pub mod worker;
pub mod world;

pub use crate::support::rounds;

use crate::support::number;
use case::{Case, Made};
use fathom_testing::is_time_up;

/// Prints how to repeat a failing test.
pub struct Again(String);

impl Again {
    pub fn new(what: String) -> Again {
        Again(what)
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("with {}", self.0);
        }
    }
}

/// Calls `test` with each case's image and `count` seeds. FATHOM_CASE selects a case. FATHOM_SEED
/// is the first of FATHOM_ROUNDS seeds, or the only one. Returns early when the time of
/// `make torture` is up.
pub fn each(cases: &[Case], count: u64, test: impl Fn(&Made, u64)) {
    let only = std::env::var("FATHOM_CASE").ok();
    let seed = number("FATHOM_SEED");
    let chosen = |case: &&Case| only.as_ref().is_none_or(|name| name == case.name);
    for case in cases.iter().filter(chosen) {
        let seeds = match seed {
            Some(seed) => seed..seed + rounds(1),
            None => 1..count + 1,
        };
        for seed in seeds {
            if is_time_up() {
                return;
            }
            let name = case.name;
            let _again = Again::new(format!("FATHOM_CASE={name} FATHOM_SEED={seed}"));
            let dir = crate::support::dir();
            test(&case.make(dir.path(), seed), seed);
        }
    }
}
