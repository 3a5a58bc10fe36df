//! Repeats tests whose outcome depends on chance, because they measure times or share the machine
//! with other work.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Number by which failures must exceed successes to fail the test.
const MORE: u32 = 4;

/// Repeats `attempt`, which panics on a failure, until it has succeeded once more than it has
/// failed. Fails when failures exceed successes by [four](MORE).
///
/// An attempt must succeed in at least 95 of 100 cases on any machine. Then fewer than 1 of 100,000
/// runs fail without a defect: a random walk with these steps reaches -4 before +1 with a
/// probability of 7e-6. A defect that lets only 5 of 100 attempts succeed is missed in 5 of 100
/// runs.
///
/// # Panics
/// With the panic of the last attempt.
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

    /// Returns how many attempts are made if they have these results, and whether the decision is
    /// success.
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
