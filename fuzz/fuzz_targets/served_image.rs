//! An image that is changed behind its server's back.
#![no_main]

use fathom_formats::testing::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::served_image(data));
