//! Priority of tests that measure, on a machine that is busy with other programs.

use rustix::process::setpriority_process;

/// The highest priority (setpriority(2)).
const HIGHEST: i32 = -20;

/// Gives the calling thread, and all threads and processes that it starts from now on, the highest
/// priority. Work of other programs then hardly affects the measurements. Does nothing without
/// root.
pub fn outrank_other_programs() {
    // (On Linux, a priority belongs to a thread.)
    let _ = setpriority_process(None, HIGHEST);
}
