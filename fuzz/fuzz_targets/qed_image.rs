//! A QED image with changes, checked and repaired.
#![no_main]

use fathom_formats::testing::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::qed_image(data));
