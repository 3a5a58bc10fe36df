//! An NBD client that asks for what it likes.
#![no_main]

use fathom_exports::nbd::connection::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::transmission(data));
