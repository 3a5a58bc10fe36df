//! Noisy neighbours: measures some hosts alone and together with the load of others, in turn.

use super::client::{Clients, Part, run};
use super::told::{Together, Told};
use anyhow::{Context, bail};
use clap::Args;
use fathom_load::{Load, Rw};
use fathom_units::parse_size;
use serde::Serialize;
use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time that the noise runs longer than the measured load.
const LONGER: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
pub struct Noise {
    /// Hosts that run a second load as noise in every other round
    ///
    /// The report compares the results of --client with and without the noise.
    #[arg(
        long,
        value_name = "HOST,...",
        value_delimiter = ',',
        requires = "client",
        conflicts_with_all = ["fio", "number_ios", "verify"],
        help_heading = "Many hosts"
    )]
    pub noise: Vec<String>,

    /// Kind of load of the noise [default: the value of --rw]
    #[arg(long, value_name = "RW", requires = "noise", value_parser = crate::bench::rw(), help_heading = "Many hosts")]
    noise_rw: Option<Rw>,

    /// Bytes per request of the noise [default: the value of --bs]
    #[arg(long, value_name = "SIZE", requires = "noise", value_parser = parse_size, help_heading = "Many hosts")]
    noise_bs: Option<u64>,

    /// Requests in flight per queue of the noise
    #[arg(
        long,
        value_name = "N",
        requires = "noise",
        default_value_t = 32,
        help_heading = "Many hosts"
    )]
    noise_iodepth: u16,

    /// Number of rounds with noise and of rounds without
    #[arg(long, value_name = "N", requires = "noise", default_value_t = 3,
          value_parser = clap::value_parser!(u16).range(1..), help_heading = "Many hosts")]
    rounds: u16,
}

/// The results of one round, alone and with noise.
#[derive(Debug, Serialize)]
struct Round {
    alone: Vec<Together>,
    beside: Vec<Together>,
}

/// Comparison of one operation.
///
/// A ratio is the result with noise divided by the result alone, of the same round. Each `Ratio`
/// has the median, the minimum and the maximum of all rounds.
#[derive(Debug, Serialize)]
struct Compared {
    op: String,
    iops: Option<Ratio>,
    mean: Option<Ratio>,
    p50: Option<Ratio>,
    p99: Option<Ratio>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Ratio {
    alone: f64,
    beside: f64,
    median: f64,
    least: f64,
    greatest: f64,
}

#[derive(Debug, Serialize)]
pub struct Noisy {
    rounds: Vec<Round>,
    operations: Vec<Compared>,
}

impl Noise {
    /// Runs the rounds and compares them. `load` is the load of the measured hosts.
    pub fn run(&self, args: &Clients, load: &Load) -> anyhow::Result<Noisy> {
        let runtime = load
            .runtime
            .context("--noise needs a load that ends after a time")?;
        if let Some(both) = self.noise.iter().find(|host| args.client.contains(host)) {
            bail!("{both}: in both --client and --noise; remove it from one of them");
        }
        let noise = Load {
            rw: self.noise_rw.unwrap_or(load.rw),
            bs: match self.noise_bs {
                Some(bs) => u32::try_from(bs).context("--noise-bs is too large")?,
                None => load.bs,
            },
            iodepth: self.noise_iodepth,
            ramp: Duration::ZERO,
            runtime: Some(load.ramp + runtime + LONGER),
            ..load.clone()
        };
        let part = |load: &Load| {
            let load = load.clone();
            move |host: &String| Part {
                host: host.clone(),
                load: load.clone(),
            }
        };
        let alone: Vec<_> = args.client.iter().map(part(load)).collect();
        let beside: Vec<_> = alone
            .iter()
            .cloned()
            .chain(self.noise.iter().map(part(&noise)))
            .collect();
        let mut rounds = Vec::new();
        for number in 0..self.rounds {
            // The two measurements alternate in being first.
            let measure = |parts: &[Part]| measured(run(args, parts)?, &args.client);
            let first = if number % 2 == 0 {
                Some(measure(&alone)?)
            } else {
                None
            };
            let beside = measure(&beside)?;
            let alone = first.map_or_else(|| measure(&alone), Ok)?;
            if load.stop.load(Ordering::Relaxed) {
                break; // this round is incomplete
            }
            rounds.push(Round { alone, beside });
        }
        if rounds.is_empty() {
            bail!("the load ended before the measurement");
        }
        let operations = compare(&rounds);
        Ok(Noisy { rounds, operations })
    }
}

/// Returns the merged results of the measured hosts, without the noise.
fn measured(mut told: Told, hosts: &[String]) -> anyhow::Result<Vec<Together>> {
    if let Some(problem) = told.problems().first() {
        bail!("{problem}");
    }
    told.hosts.retain(|one| hosts.contains(&one.host));
    told.merge();
    match told.errors() {
        0 => Ok(told.operations),
        errors => bail!("{errors} requests failed"),
    }
}

fn compare(rounds: &[Round]) -> Vec<Compared> {
    let ops = rounds[0].alone.iter().map(|one| &one.op);
    let of = |op: &str, figure: &dyn Fn(&Together) -> Option<f64>| {
        let one = |these: &[Together]| figure(these.iter().find(|one| one.op == op)?);
        let pairs: Option<Vec<_>> = rounds
            .iter()
            .map(|round| one(&round.alone).zip(one(&round.beside)))
            .collect();
        let pairs = pairs?;
        let ratios = sorted(pairs.iter().map(|(alone, beside)| beside / alone.max(1e-9)));
        Some(Ratio {
            alone: median(&sorted(pairs.iter().map(|pair| pair.0))),
            beside: median(&sorted(pairs.iter().map(|pair| pair.1))),
            median: median(&ratios),
            least: ratios[0],
            greatest: ratios[ratios.len() - 1],
        })
    };
    ops.map(|op| Compared {
        op: op.clone(),
        iops: of(op, &|one| Some(one.iops)),
        mean: of(op, &|one| Some(one.latency.mean_ns)),
        p50: of(op, &|one| one.latency.p50_ns),
        p99: of(op, &|one| one.latency.p99_ns),
    })
    .collect()
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the median of sorted values, of which there is at least one.
fn median(values: &[f64]) -> f64 {
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

impl fmt::Display for Noisy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<13}{:<8}{:>12} {:>12}   with noise / alone",
            "operation", "", "alone", "with noise"
        )?;
        for one in &self.operations {
            let figures = [
                ("IOPS", one.iops, 1.0),
                ("mean us", one.mean, 1e3),
                ("p50 us", one.p50, 1e3),
                ("p99 us", one.p99, 1e3),
            ];
            for (name, ratio, unit) in figures {
                write!(f, "{:<13}{name:<8}", fathom_img::shown(&one.op))?;
                match ratio {
                    Some(ratio) => writeln!(
                        f,
                        "{:>12.1} {:>12.1}   {:.2} ({:.2} to {:.2})",
                        ratio.alone / unit,
                        ratio.beside / unit,
                        ratio.median,
                        ratio.least,
                        ratio.greatest
                    )?,
                    None => writeln!(f, "{:>12} {:>12}   too few requests", "-", "-")?,
                }
            }
        }
        writeln!(
            f,
            "medians of {} rounds, in which both were measured",
            self.rounds.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_load::Latency;

    #[test]
    fn ratios_are_those_of_a_round() {
        let op = |iops: f64, p99: Option<f64>| Together {
            op: "read".to_owned(),
            ios: 1,
            iops,
            mb_per_s: 0.0,
            latency: Latency {
                mean_ns: 10.0,
                p50_ns: Some(5.0),
                p99_ns: p99,
                ..Latency::default()
            },
        };
        // The machine becomes slower, but in each round the noise halves the result.
        let round = |iops: f64, p99| Round {
            alone: vec![op(iops, Some(1.0))],
            beside: vec![op(iops / 2.0, p99)],
        };
        let rounds = [
            round(100.0, Some(3.0)),
            round(50.0, Some(4.0)),
            round(10.0, None),
        ];
        let compared = compare(&rounds);
        let iops = compared[0].iops.unwrap();
        assert_eq!((iops.median, iops.least, iops.greatest), (0.5, 0.5, 0.5));
        assert_eq!((iops.alone, iops.beside), (50.0, 25.0));
        assert!(compared[0].p99.is_none());
        assert_eq!(compare(&rounds[..2])[0].p99.unwrap().median, 3.5);
    }
}
