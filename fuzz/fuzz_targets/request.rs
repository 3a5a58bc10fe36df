//! A virtio-blk request of any shape.
#![no_main]

use fathom_virtio::testing::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::request(data));
