use super::*;

/// Returns the logarithms of values.
fn logarithms(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| logarithm(*value)).collect()
}

/// Returns the pairs with the signs of `number`'s bits.
fn signed(sizes: &[f64], number: usize) -> Vec<f64> {
    let sizes = sizes.iter().enumerate();
    let sign = |place: usize| if number >> place & 1 == 0 { 1.0 } else { -1.0 };
    sizes.map(|(place, size)| size * sign(place)).collect()
}

/// Splits values into two runs by the bits of `number`.
fn split(values: &[f64], number: usize) -> [Vec<f64>; 2] {
    let of = |bit| {
        let values = values.iter().enumerate();
        let own = values.filter(|(place, _)| number >> place & 1 == bit);
        own.map(|(_, value)| *value).collect()
    };
    [of(1), of(0)]
}

/// Differences of ten rounds without an order, in units.
const SIZES: [f64; 10] = [31e6, 4e6, 159e6, 26e6, 53e6, 58e6, 97e6, 93e6, 23e6, 84e6];
/// Levels at which false alarms are counted.
const LEVELS: [f64; 4] = [0.2, 0.05, 0.01, 0.002];

/// Returns the share of tests with at most each probability.
fn shares(tests: &[f64]) -> [f64; 4] {
    LEVELS.map(|level| {
        let few = tests.iter().filter(|p| **p <= level + 1e-12).count();
        few as f64 / tests.len() as f64
    })
}

#[test]
fn pairs_raise_no_more_false_alarms_than_stated() {
    // Equal sizes are ties, which make fewer probabilities possible.
    let tied = [7e6; 10];
    for sizes in [SIZES, tied] {
        for count in 1..=sizes.len() {
            let numbers = 0..1usize << count;
            let tests = numbers.map(|number| pairs(&signed(&sizes[..count], number)).p);
            let shares = shares(&tests.collect::<Vec<_>>());
            for (share, level) in shares.iter().zip(LEVELS) {
                assert!(*share <= level, "{count} rounds: {share} at {level}");
            }
        }
    }
}

#[test]
fn runs_raise_no_more_false_alarms_than_stated() {
    let tied = [1e6, 1e6, 2e6, 2e6, 2e6, 3e6, 4e6, 4e6, 5e6, 9e6];
    for values in [SIZES, tied] {
        for of in 1..=5 {
            let numbers = (0..1usize << 10).filter(|number| number.count_ones() == of);
            let tests = numbers.map(|number| {
                let [of, to] = split(&values, number);
                runs(&of, &to).p
            });
            let shares = shares(&tests.collect::<Vec<_>>());
            for (share, level) in shares.iter().zip(LEVELS) {
                assert!(*share <= level, "{of} of 10: {share} at {level}");
            }
        }
    }
}

#[test]
fn probabilities_are_those_of_all_exchanges() {
    // Positive ranks of every exchange, and those at least as one-sided as the observed one.
    let count = 8;
    let sum = |number: usize| -> usize {
        let signs = signed(&SIZES[..count], number);
        let ranks = ranks(&SIZES[..count]);
        let positive = ranks.iter().zip(&signs).filter(|(_, one)| **one > 0.0);
        positive.map(|(rank, _)| rank).sum()
    };
    let all: Vec<usize> = (0..1 << count).map(sum).collect();
    for number in 0..1 << count {
        let observed = all[number];
        let low = all.iter().filter(|one| **one <= observed).count();
        let high = all.iter().filter(|one| **one >= observed).count();
        let expected = (2.0 * low.min(high) as f64 / all.len() as f64).min(1.0);
        let told = pairs(&signed(&SIZES[..count], number)).p;
        assert!((told - expected).abs() < 1e-12, "{number}: {told}");
    }
}

#[test]
fn the_least_probability_is_reached_and_not_undercut() {
    for count in 1..=10u32 {
        let differences = &SIZES[..count as usize];
        let least = least_of_pairs(count);
        assert!((pairs(differences).p - least).abs() < 1e-12, "{count}");
        let other: Vec<f64> = SIZES.iter().map(|one| one - 1e9).collect();
        for of in 1..=10u32 {
            let (of_rounds, to) = (&SIZES[..of as usize], &other[..count as usize]);
            let least = least_of_runs(of, count);
            let p = runs(of_rounds, to).p;
            assert!((p - least).abs() < 1e-12, "{of} and {count}: {p}, {least}");
        }
    }
    assert_eq!(least_of_pairs(0), 1.0);
    assert_eq!(least_of_pairs(6), 1.0 / 32.0);
    assert!(least_of_runs(4, 4) < 0.05 && least_of_runs(3, 4) > 0.05);
}

#[test]
fn the_normal_distribution_takes_over_without_a_step() {
    // Just as many rounds as are counted, and one more; the tail of both matters.
    for wrong in [24, 28, 31] {
        let differences = |count: usize| -> Vec<f64> {
            let sign = |i: usize| if i % 50 < wrong { -1.0 } else { 1.0 };
            (0..count)
                .map(|i| sign(i) * (1e6 + 7e3 * i as f64))
                .collect()
        };
        let counted = pairs(&differences(MOST_PAIRS)).p;
        let ranks: Vec<usize> = (1..=MOST_PAIRS).map(|rank| 2 * rank).collect();
        let low: usize = ranks[..wrong].iter().sum();
        let all: usize = ranks.iter().sum();
        let squares: f64 = ranks.iter().map(|rank| (*rank as f64).powi(2)).sum();
        let estimated = normal(all as f64 / 2.0 - low as f64, squares / 4.0);
        let error = (counted - estimated).abs();
        assert!(error < 0.002 && counted > 0.0, "{counted}, not {estimated}");
    }
    let (of, to): (Vec<f64>, Vec<f64>) = (0..2 * MOST_OF_RUNS)
        .map(|i| 1e6 * (i * 37 % 101) as f64)
        .partition(|value| (*value as u64 / 1_000_000).is_multiple_of(2));
    let p = runs(&of, &to).p;
    assert!((0.05..=1.0).contains(&p), "{p}");
    for (x, expected) in [(0.0, 1.0), (1.0, 0.157_299_207), (3.0, 2.209_05e-5)] {
        let told = complement(x);
        assert!((told - expected).abs() < 2e-7 * expected, "{x}: {told}");
    }
}

#[test]
fn an_interval_holds_what_the_test_does_not_exclude() {
    let differences = [3e6, -1e6, 8e6, 5e6, 9e6, 2e6, 7e6, 4e6, 11e6];
    let (low, high) = interval_of_pairs(&differences).unwrap();
    let of: Vec<f64> = differences.iter().map(|one| one * 1.5).collect();
    let to = [2e6, 5e6, -3e6, 1e6, 6e6];
    let (low_of_runs, high_of_runs) = interval_of_runs(&of, &to).unwrap();
    for step in -600..=2000 {
        // Never on a difference, where ranks are tied.
        let shift = 1e4 * f64::from(step) + 11.0;
        let factor = ratio(shift);
        let less = |values: &[f64]| values.iter().map(|one| one - shift).collect::<Vec<_>>();
        let is_in = (low..=high).contains(&factor);
        assert_eq!(pairs(&less(&differences)).p > FALSE_ALARMS, is_in, "{step}");
        let is_in = (low_of_runs..=high_of_runs).contains(&factor);
        assert_eq!(runs(&less(&of), &to).p > FALSE_ALARMS, is_in, "{step}");
    }
}

#[test]
fn intervals_need_rounds_and_finite_ratios() {
    let six = &SIZES[..6];
    assert_eq!(interval_of_pairs(&six[..5]), None);
    let (low, high) = interval_of_pairs(six).unwrap();
    assert!((low.ln() - 4e6 * UNIT).abs() < 1e-12 && (high.ln() - 159e6 * UNIT).abs() < 1e-12);
    let zero = [&SIZES[..6], &[f64::NEG_INFINITY]].concat();
    assert_eq!(interval_of_pairs(&zero), None);
    assert_eq!(interval_of_runs(&SIZES[..3], &SIZES[..3]), None);
    assert!(interval_of_runs(&SIZES[..4], &SIZES[..4]).is_some());
    let many: Vec<f64> = (0..300).map(|i| 1e6 * f64::from(i * 37 % 300)).collect();
    let (low, high) = interval_of_pairs(&many).unwrap();
    assert!(low < high && low > ratio(100e6) && high < ratio(200e6));
    let (low, high) = interval_of_runs(&many, &many).unwrap();
    assert!(low < 1.0 && high > 1.0 && (low * high - 1.0).abs() < 1e-9);
}

#[test]
fn ties_and_absurd_values_are_no_difference() {
    let none = Tested {
        p: 1.0,
        direction: Ordering::Equal,
    };
    assert_eq!(pairs(&[]), none);
    assert_eq!(pairs(&[0.0; 9]), none);
    // An error of rounding is no difference.
    assert_eq!(pairs(&[1.0; 9]), none);
    assert_eq!(runs(&[5.0; 4], &[5.0; 9]), none);
    let zero = logarithms(&[0.0, 1.0]);
    assert_eq!(difference(zero[0], zero[0]), 0.0);
    assert_eq!(difference(zero[0], zero[1]), f64::NEG_INFINITY);
    assert_eq!(pairs(&[f64::NEG_INFINITY; 6]).p, 1.0 / 32.0);
}
