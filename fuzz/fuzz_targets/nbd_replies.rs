//! An NBD server that answers what it likes.
#![no_main]

use fathom_storage::nbd::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::replies(data));
