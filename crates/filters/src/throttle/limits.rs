//! The limits of a group in parsed form.

use super::bucket::Rate;
use crate::values::{Values, number, size, ticks};
use std::time::Duration;

/// The limits by what they count and in which direction. Defines the order of the buckets.
pub(super) const COUNTED: [(&str, What, Direction); 6] = [
    ("iops-total", What::Operations, Direction::Both),
    ("iops-read", What::Operations, Direction::Read),
    ("iops-write", What::Operations, Direction::Write),
    ("bps-total", What::Bytes, Direction::Both),
    ("bps-read", What::Bytes, Direction::Read),
    ("bps-write", What::Bytes, Direction::Write),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Operations,
    Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Both,
    Read,
    Write,
}

/// Room of a bucket without bursts, as time at its rate. This room lets a worker that wakes up
/// late, on a busy machine, catch up. The bucket is full at first. After a pause it releases no
/// more than this room: less than 1% of the rate over 10 s. (QEMU has 100 ms.)
const SLACK: Duration = Duration::from_millis(90);

/// Maximum rate per second.
const MOST: u64 = 1 << 40;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limit {
    pub(super) sustained: Rate,
    pub(super) may_burst: bool,
    /// Rate of a burst; none if it is not limited.
    pub(super) burst: Option<Rate>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Limits {
    /// Limits in the order of [`COUNTED`].
    pub(super) each: [Option<Limit>; COUNTED.len()],
    /// Size in bytes up to which an operation counts as one; none if every operation counts as one.
    pub(super) iops_size: Option<u64>,
}

impl Limits {
    /// Returns limits that limit nothing.
    pub(super) fn unlimited() -> Limits {
        Limits {
            each: [None; COUNTED.len()],
            iops_size: None,
        }
    }

    pub(super) fn parse(values: &Values<'_>) -> Result<Limits, String> {
        let mut each = [None; COUNTED.len()];
        for (limit, (name, what, _)) in each.iter_mut().zip(COUNTED) {
            *limit = parse_limit(values, name, what)?;
        }
        for (total, name) in [(0, "iops"), (3, "bps")] {
            let both = each[total].is_some();
            if both && each[total + 1].or(each[total + 2]).is_some() {
                return Err(format!(
                    "throttle: {name}-total: excludes {name}-read and {name}-write"
                ));
            }
        }
        let iops_size = values.get("iops-size", size)?;
        Ok(Limits {
            each,
            iops_size: (iops_size > 0).then_some(iops_size),
        })
    }
}

fn parse_limit(values: &Values<'_>, name: &str, what: What) -> Result<Option<Limit>, String> {
    let rate = |text: &str| match what {
        What::Operations => number(text),
        What::Bytes => size(text),
    };
    let bounded = |text: &str| match rate(text)? {
        rate if rate > MOST => Err(format!("'{text}' exceeds the largest limit")),
        rate => Ok(rate),
    };
    let (max_name, length_name) = (format!("{name}-max"), format!("{name}-max-length"));
    let sustained = values.get(name, bounded)?;
    let max = values.get(&max_name, bounded)?;
    let length = values.get(&length_name, |text| match number(text)? {
        seconds @ 1..=86_400 => Ok(seconds),
        _ => Err("a burst lasts from 1 to 86400 seconds".into()),
    })?;
    let refuse = |problem: String| Err(format!("throttle: {problem}"));
    match (sustained, max) {
        (_, 0) if length > 1 => refuse(format!("{length_name}: needs {max_name}")),
        (0, 1..) => refuse(format!("{max_name}: needs {name}")),
        (_, 1..) if max < sustained => refuse(format!("{max_name}: less than {name}")),
        (0, _) => Ok(None),
        _ => Ok(Some(limit(sustained, max, length))),
    }
}

/// Computes a limit as QEMU does: a bucket of `max * length` units that leaks at the sustained
/// rate. Bursts of more than a second have a second bucket that leaks at the burst rate.
fn limit(sustained: u64, max: u64, length: u64) -> Limit {
    let rate = |per_second: u64, room: Duration| Rate {
        ticks_per_unit: ticks(Duration::from_secs(1)) as f64 / per_second as f64,
        room: ticks(room),
    };
    if max == 0 {
        return Limit {
            sustained: rate(sustained, SLACK),
            may_burst: false,
            burst: None,
        };
    }
    let full = Duration::from_secs_f64(max as f64 * length as f64 / sustained as f64);
    Limit {
        sustained: rate(sustained, full),
        may_burst: true,
        burst: (length > 1).then(|| rate(max, SLACK)),
    }
}

#[cfg(test)]
mod tests {
    use crate::registry::Filters;

    #[test]
    fn what_does_not_go_together_is_told() {
        let make = |options: &str| {
            let spec = format!("throttle:{options}").parse().expect("well formed");
            Filters::default().make(&spec).map(drop)
        };
        for good in [
            "iops-total=3000",
            "iops-read=100,iops-write=200,bps-total=100M",
            "iops-total=100,iops-total-max=2000,iops-total-max-length=60",
            "bps-read=1M,bps-read-max=1M",
            "iops-total=100,iops-size=4k",
        ] {
            assert_eq!(make(good), Ok(()), "{good}");
        }
        for bad in [
            "iops-total=100,iops-read=50",
            "bps-total=1M,bps-write=1M",
            "iops-total-max=100",
            "iops-total=100,iops-total-max=50",
            "iops-total=100,iops-total-max-length=5",
            "iops-total-max-length=5",
            "iops-total=100,iops-total-max=200,iops-total-max-length=0",
            "iops-total=1k",
            "bps-total=3T",
        ] {
            assert!(make(bad).is_err(), "{bad}");
        }
    }
}
