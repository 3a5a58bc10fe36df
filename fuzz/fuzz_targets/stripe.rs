//! A stripe of an archive.
#![no_main]

use fathom_archive::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::stripe(data));
