//! A packed virtqueue whose driver does what it likes.
#![no_main]

use fathom_virtio::testing::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::packed_ring(data));
