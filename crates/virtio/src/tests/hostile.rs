//! Runs the fuzz targets on pseudo-random input, without a fuzzer.

use crate::testing::fuzz;
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use std::time::{Duration, Instant};

/// Minimum number of inputs per run; more are tried while time permits.
const ALWAYS: u32 = 20_000;

fn run(target: fn(&[u8])) {
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut data = [0; 512];
    let mut inputs = 0;
    while inputs < ALWAYS || Instant::now() < deadline {
        random.fill_bytes(&mut data);
        let len = random.next_u32() as usize % data.len();
        target(&data[..len]);
        inputs += 1;
    }
}

#[test]
fn no_ring_gets_the_better_of_us() {
    run(fuzz::ring);
}

#[test]
fn no_packed_ring_gets_the_better_of_us() {
    run(fuzz::packed_ring);
}

#[test]
fn no_request_gets_the_better_of_us() {
    run(fuzz::request);
}
