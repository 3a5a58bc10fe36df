//! Reads /proc/pressure: time in which some task waited for a resource
//! (Documentation/accounting/psi.rst).

use fathom_run::evidence::Pressure;

/// Microseconds since the machine started, for CPU, I/O and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals([u64; 3]);

/// Reads the totals. Returns `None` if the kernel does not count them.
pub fn read() -> Option<Totals> {
    let mut totals = [0; 3];
    for (total, resource) in totals.iter_mut().zip(["cpu", "io", "memory"]) {
        let text = super::read(format!("/proc/pressure/{resource}")).ok()?;
        *total = parse(&text)?;
    }
    Some(Totals(totals))
}

/// Parses a line such as `some avg10=78.58 avg60=79.33 avg300=60.91 total=362875034`.
fn parse(text: &str) -> Option<u64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let mut words = some.split_ascii_whitespace();
    words
        .find_map(|word| word.strip_prefix("total="))?
        .parse()
        .ok()
}

/// Returns the pressure in a window of `seconds`, in percent.
pub fn between(before: Totals, after: Totals, seconds: f64) -> Pressure {
    let percent = |resource: usize| {
        let us = after.0[resource].saturating_sub(before.0[resource]);
        (us as f64 / (seconds * 1e6) * 100.0).min(100.0)
    };
    Pressure {
        cpu: percent(0),
        io: percent(1),
        memory: percent(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_become_percent_of_the_window() {
        let text = "some avg10=78.58 avg60=79.33 avg300=60.91 total=362875034\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(parse(text), Some(362_875_034));
        let pressure = between(Totals([100, 0, 7]), Totals([500_100, 2_000_000, 7]), 1.0);
        assert_eq!(
            pressure,
            Pressure {
                cpu: 50.0,
                io: 100.0,
                memory: 0.0
            }
        );
    }

    #[test]
    fn other_texts_have_none() {
        for text in ["", "full total=3\n", "some avg10=1\n", "some total=x\n"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
