//! The cost of tracing: compares traced rounds with the nearest untraced ones.

use fathom_run::Round;

use crate::analysis::Overhead;

/// Number of resamples of the bootstrap.
const RESAMPLES: usize = 10_000;
/// Seed of the bootstrap; fixed, so that the same run always gives the same figures.
const SEED: u64 = 0x5eed_fa70_0123_4567;

/// A set of collectors, and (traced mean, control mean) of each of its rounds.
type Pairs<'a> = (&'a [String], Vec<(f64, f64)>);

/// Returns, for each set of collectors, the difference of the benchmark's mean between its rounds
/// and the untraced rounds nearest to them.
pub(crate) fn overheads(rounds: &[Round]) -> Vec<Overhead> {
    let figure = |round: &Round| {
        let benchmark = round.benchmark.as_ref()?;
        (!round.on_host && benchmark.operations > 0).then_some(benchmark.mean_ns)
    };
    let untraced: Vec<(usize, f64)> = rounds
        .iter()
        .enumerate()
        .filter(|(_, round)| round.traced.is_empty())
        .filter_map(|(i, round)| Some((i, figure(round)?)))
        .collect();
    let mut sets: Vec<Pairs> = Vec::new();
    for (i, round) in rounds.iter().enumerate() {
        if round.traced.is_empty() {
            continue;
        }
        let Some(traced) = figure(round) else {
            continue;
        };
        // The nearest untraced round; of two equally near, the earlier one.
        let nearest = untraced.iter().min_by_key(|(at, _)| (at.abs_diff(i), *at));
        let Some(&(_, control)) = nearest else {
            continue;
        };
        match sets.iter_mut().find(|(set, _)| *set == round.traced) {
            Some((_, pairs)) => pairs.push((traced, control)),
            None => sets.push((&round.traced, vec![(traced, control)])),
        }
    }
    sets.into_iter()
        .map(|(set, pairs)| overhead(set, &pairs))
        .collect()
}

fn overhead(traced: &[String], pairs: &[(f64, f64)]) -> Overhead {
    let n = pairs.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / n;
    let differences: Vec<f64> = pairs.iter().map(|(a, b)| a - b).collect();
    let (low, high) = interval(&differences);
    Overhead {
        traced: traced.to_vec(),
        traced_ns: mean(|pair| pair.0),
        untraced_ns: mean(|pair| pair.1),
        difference_ns: mean(|pair| pair.0 - pair.1),
        low_ns: low,
        high_ns: high,
        pairs: pairs.len() as u32,
    }
}

/// Returns the 95% interval of the mean, by the percentile bootstrap.
fn interval(values: &[f64]) -> (f64, f64) {
    let mut random = SEED;
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let drawn = values
                .iter()
                .map(|_| values[draw(&mut random, values.len())]);
            drawn.sum::<f64>() / values.len() as f64
        })
        .collect();
    means.sort_by(f64::total_cmp);
    (means[RESAMPLES / 40], means[RESAMPLES - 1 - RESAMPLES / 40])
}

/// Returns a random number below `n`, by splitmix64.
fn draw(state: &mut u64, n: usize) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((u128::from(z ^ z >> 31) * n as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::Benchmark;

    fn round(traced: &[&str], mean_ns: f64) -> Round {
        Round {
            traced: traced.iter().map(|&name| name.into()).collect(),
            benchmark: Some(Benchmark {
                operations: 100,
                mean_ns,
                ..Benchmark::default()
            }),
            ..Round::default()
        }
    }

    #[test]
    fn each_traced_round_is_set_against_its_neighbour() {
        // The machine slows down during the run; only pairs show that tracing costs about 10.
        let mut rounds = Vec::new();
        for i in 0..20 {
            let drift = f64::from(i) * 1000.0;
            rounds.push(round(&[], drift + f64::from(i % 3)));
            rounds.push(round(&["kvm"], drift + 10.0));
        }
        rounds.push(Round {
            on_host: true,
            ..round(&[], 1.0)
        });
        let all = overheads(&rounds);
        assert_eq!(all.len(), 1);
        let kvm = &all[0];
        assert_eq!((kvm.pairs, kvm.traced[0].as_str()), (20, "kvm"));
        assert!((kvm.difference_ns - 9.05).abs() < 1e-6);
        assert!(kvm.low_ns < kvm.difference_ns && kvm.difference_ns < kvm.high_ns);
        // The theoretical value: +-1.96 standard errors of 0.83 / sqrt(20) each.
        assert!((kvm.high_ns - kvm.low_ns - 2.0 * 1.96 * 0.19).abs() < 0.1);
        assert_eq!(overheads(&rounds), all, "the same figures every time");
    }

    #[test]
    fn without_a_control_nothing_is_said() {
        assert!(overheads(&[round(&["kvm"], 1.0)]).is_empty());
    }
}
