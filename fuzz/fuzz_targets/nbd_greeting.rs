//! An NBD server that greets as it likes.
#![no_main]

use fathom_nbd::client::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::greeting(data));
