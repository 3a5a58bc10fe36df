//! Marks code whose instructions `tools/bench/instructions.py` counts.

use std::hint::black_box;

/// Number of times that a path runs before it is counted: caches, tables and histograms then have
/// the state in which a server has them.
const WARM: usize = 64;

/// Runs a path of `requests` requests until it is warm, then once more inside
/// [`counted_instructions`], and prints the path's name and the number of requests.
///
/// `prepare` does the work of the path's peer, such as a driver, and is not counted.
pub fn count_instructions<S>(
    name: &str,
    requests: u32,
    state: &mut S,
    prepare: impl Fn(&mut S),
    path: impl Fn(&mut S),
) {
    for _ in 0..WARM {
        prepare(state);
        path(state);
    }
    prepare(state);
    counted_instructions(&mut || path(black_box(state)));
    println!("{name}\t{requests}");
}

/// The function whose calls are counted, each by itself. callgrind needs its exact name.
// SAFETY: no other function of a program has this name.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted_instructions(path: &mut dyn FnMut()) {
    path();
}
