//! Images of other programs: any bytes as headers and tables.
#![no_main]

use fathom_foreign::testing::image;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image(data));
