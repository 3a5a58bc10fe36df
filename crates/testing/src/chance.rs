//! Tests in which chance has a part: they measure, or something else uses the machine meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The number of failures beyond successes that fails the test.
const MORE: u32 = 4;

/// Repeats `attempt`, which panics if it finds something wrong, until it has succeeded once more often than it has
/// failed. Fails when it has failed [four](MORE) times more often than it has succeeded.
///
/// Write the attempt such that it succeeds in 95 of 100 cases on any machine. Then this fails without a reason in fewer
/// than 1 of 100,000 runs: a random walk with these steps gets to -4 before it gets to +1 with a probability of 7e-6. If
/// something is wrong such that attempts succeed in 5 of 100 cases, it is overlooked in 5 of 100 runs.
///
/// # Panics
/// With what the last attempt has panicked with.
pub fn decide(mut attempt: impl FnMut()) {
    let mut failures = 0;
    loop {
        let Err(panic) = catch_unwind(AssertUnwindSafe(&mut attempt)) else {
            match failures {
                0 => return,
                _ => failures -= 1,
            }
            continue;
        };
        failures += 1;
        if failures == MORE {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::decide;
    use std::panic::catch_unwind;

    /// How many attempts are made of which these succeed, and whether that is a success.
    fn decided(succeed: &[bool]) -> (usize, bool) {
        let mut made = 0;
        let attempt = || {
            made += 1;
            assert!(succeed[made - 1], "attempt {made}");
        };
        let is_ok = catch_unwind(std::panic::AssertUnwindSafe(|| decide(attempt))).is_ok();
        (made, is_ok)
    }

    #[test]
    fn majority_decides() {
        assert_eq!(decided(&[true]), (1, true));
        assert_eq!(decided(&[false, true, true]), (3, true));
        assert_eq!(decided(&[false, true, false, true, true]), (5, true));
        assert_eq!(decided(&[false; 4]), (4, false));
        assert_eq!(
            decided(&[false, true, false, false, false, false]),
            (6, false)
        );
    }
}
