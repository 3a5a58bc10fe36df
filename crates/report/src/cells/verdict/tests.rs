use super::*;
use proptest::prelude::*;

fn rounds_of(values: &[f64]) -> Rounds {
    (1..).zip(values.iter().copied()).collect()
}

fn one(compared: Option<Unjudged>, better: Better) -> Ratio {
    judge(vec![compared.unwrap()], better).remove(0)
}

fn paired(of: &[f64], to: &[f64]) -> Ratio {
    let (of, to) = (rounds_of(of), rounds_of(to));
    one(Unjudged::paired(&of, &to), Better::Higher)
}

fn unpaired(of: &[f64], to: &[f64]) -> Ratio {
    let (of, to) = (rounds_of(of), rounds_of(to));
    one(Unjudged::unpaired(&of, &to), Better::Higher)
}

/// Draws between 0 and 1, the same each time (SplitMix64).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a figure of a machine: some noise, and now and then a round that takes long.
    fn figure(&mut self) -> f64 {
        let noise: f64 = (0..6).map(|_| self.next() - 0.5).sum();
        let stall = if self.next() < 0.1 { 0.5 } else { 1.0 };
        1000.0 * (1.0 + 0.05 * noise) * stall
    }

    fn figures<const N: usize>(&mut self) -> [f64; N] {
        std::array::from_fn(|_| self.figure())
    }
}

#[test]
fn pairs_see_through_a_drift_that_hides_a_difference() {
    // The machine becomes slower with each round; one point takes 10% longer than the other.
    let base: Vec<f64> = (0..10).map(|i| 100.0 + 20.0 * f64::from(i)).collect();
    let more: Vec<f64> = base.iter().map(|value| value * 1.1).collect();
    let ratio = paired(&more, &base);
    assert_eq!(ratio.verdict, Verdict::Better);
    assert!((ratio.median - 1.1).abs() < 1e-12);
    let lower = Unjudged::paired(&rounds_of(&more), &rounds_of(&base));
    assert_eq!(one(lower, Better::Lower).verdict, Verdict::Worse);
    assert_eq!(unpaired(&more, &base).verdict, Verdict::NoDifferenceShown);
    // Rounds that only one of them has do not count.
    let fourth = vec![(4, base[3])];
    let ratio = one(Unjudged::paired(&rounds_of(&more), &fourth), Better::Higher);
    assert_eq!((ratio.interval, ratio.p), (None, 1.0));
    assert_eq!(Unjudged::paired(&rounds_of(&more), &vec![(11, 1.0)]), None);
}

#[test]
fn few_rounds_have_no_verdict_however_far_apart() {
    let (slow, fast) = (
        [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        [9.0, 9.1, 9.2, 9.3, 9.4, 9.5],
    );
    for rounds in 1..6 {
        let ratio = paired(&fast[..rounds], &slow[..rounds]);
        let more = 6 - rounds as u32;
        assert_eq!(ratio.verdict, Verdict::NotEnoughRounds { more });
    }
    assert_eq!(paired(&fast, &slow).verdict, Verdict::Better);
    for rounds in 1..4 {
        let ratio = unpaired(&slow[..rounds], &fast[..rounds]);
        let more = 4 - rounds as u32;
        assert_eq!(ratio.verdict, Verdict::NotEnoughRounds { more });
    }
    assert_eq!(unpaired(&slow[..4], &fast[..4]).verdict, Verdict::Worse);
}

/// The more comparisons, the more rounds each of them needs; with these, it can have a verdict.
#[test]
fn the_missing_rounds_are_those_that_are_missing() {
    for count in [1, 2, 3, 10, 100] {
        let family = |rounds: u32| {
            let fast: Rounds = (1..=rounds).map(|round| (round, 2.0)).collect();
            let slow: Rounds = (1..=rounds).map(|round| (round, 1.0)).collect();
            let compared = Unjudged::paired(&fast, &slow).unwrap();
            judge(vec![compared; count], Better::Higher)
                .remove(0)
                .verdict
        };
        let Verdict::NotEnoughRounds { more } = family(3) else {
            panic!("{count}: a verdict of three rounds");
        };
        assert_eq!(family(3 + more), Verdict::Better, "{count}");
        let almost = Verdict::NotEnoughRounds { more: 1 };
        assert_eq!(family(2 + more), almost, "{count}");
    }
}

#[test]
fn families_without_a_difference_have_few_verdicts() {
    const FAMILIES: u32 = 1_000;
    let mut draws = Draws(7);
    let (mut of_pairs, mut of_runs) = (0, 0);
    for _ in 0..FAMILIES {
        // Five points against a common base, as in a ranking.
        let base = rounds_of(&draws.figures::<9>());
        let points: [Rounds; 5] = std::array::from_fn(|_| rounds_of(&draws.figures::<9>()));
        let has_verdict = |compare: fn(&Rounds, &Rounds) -> Option<Unjudged>| {
            let family = points.iter().filter_map(|point| compare(point, &base));
            let ratios = judge(family.collect(), Better::Higher);
            assert!(
                ratios
                    .iter()
                    .all(|ratio| !matches!(ratio.verdict, Verdict::NotEnoughRounds { .. }))
            );
            u32::from(ratios.iter().any(|ratio| ratio.verdict.is_difference()))
        };
        of_pairs += has_verdict(Unjudged::paired);
        of_runs += has_verdict(Unjudged::unpaired);
    }
    // 50 are allowed; three standard deviations above, a true rate of 50 is out of the question.
    assert!(of_pairs <= 70, "{of_pairs} of {FAMILIES}");
    assert!(of_runs <= 70, "{of_runs} of {FAMILIES}");
}

/// `--until` looks after every round, and ends a run whose interval happens to be narrow. These
/// runs have a few more false verdicts than those with a fixed number of rounds.
#[test]
fn runs_that_end_by_their_width_have_few_verdicts() {
    const RUNS: u32 = 500;
    let mut draws = Draws(3);
    let mut wrong = 0;
    for _ in 0..RUNS {
        let (mut of, mut to) = (draws.figures::<5>().to_vec(), draws.figures::<5>().to_vec());
        let ratio = loop {
            of.push(draws.figure());
            to.push(draws.figure());
            let ratio = paired(&of, &to);
            let (low, high) = ratio.interval.unwrap();
            if high - low < 0.1 * ratio.median || of.len() == 30 {
                break ratio;
            }
        };
        wrong += u32::from(ratio.verdict.is_difference());
    }
    // 8% in larger simulations, plus three standard deviations.
    assert!(wrong <= 58, "{wrong} of {RUNS}");
}

#[test]
fn a_clear_difference_is_found_among_points_that_do_not_differ() {
    let mut draws = Draws(1);
    let mut found = 0;
    for _ in 0..200 {
        let base = draws.figures::<12>();
        let fast = rounds_of(&base.map(|value| value * (1.1 + 0.02 * draws.next())));
        let same = rounds_of(&draws.figures::<12>());
        let base = rounds_of(&base);
        let family = [&fast, &same].map(|point| Unjudged::paired(point, &base).unwrap());
        let ratios = judge(family.to_vec(), Better::Higher);
        found += u32::from(ratios[0].verdict == Verdict::Better);
    }
    assert_eq!(found, 200);
}

#[test]
fn holm_corrects_each_by_those_that_are_left() {
    assert_eq!(holm(&[]), [0.0; 0]);
    assert_eq!(holm(&[0.03]), [0.03]);
    let corrected = holm(&[0.02, 0.01, 0.5, 0.04]);
    let expected = [0.06, 0.04, 0.5, 0.08];
    for (told, expected) in corrected.iter().zip(expected) {
        assert!((told - expected).abs() < 1e-12, "{corrected:?}");
    }
    // None becomes less than one before it.
    assert_eq!(holm(&[0.25, 0.1875, 0.26]), [0.5625; 3]);
}

#[test]
fn absurd_figures_have_no_ratio_and_no_infinity() {
    let tiny = rounds_of(&[1e-308; 6]);
    let huge = rounds_of(&[1e308; 6]);
    assert_eq!(Unjudged::unpaired(&huge, &tiny), None);
    assert_eq!(Unjudged::paired(&huge, &tiny), None);
    let nothing = paired(&[0.0; 6], &[1.0; 6]);
    assert_eq!((nothing.median, nothing.interval), (0.0, Some((0.0, 0.0))));
    assert_eq!(nothing.verdict, Verdict::Worse);
    assert_eq!(
        paired(&[1.0; 9], &[1.0; 9]).verdict,
        Verdict::NoDifferenceShown
    );
}

fn mirrored(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Better => Verdict::Worse,
        Verdict::Worse => Verdict::Better,
        other => other,
    }
}

/// Returns the verdict's place from worse to better.
fn place(verdict: Verdict) -> i8 {
    match verdict {
        Verdict::Worse => -1,
        Verdict::NoDifferenceShown | Verdict::NotEnoughRounds { .. } => 0,
        Verdict::Better => 1,
    }
}

type Compare = fn(&[f64], &[f64]) -> Ratio;
const BOTH: [Compare; 2] = [paired, unpaired];

fn figures() -> impl Strategy<Value = (Vec<f64>, Vec<f64>)> {
    (1..14usize).prop_flat_map(|rounds| {
        let values = || prop::collection::vec(0.5..2.0, rounds);
        (values(), values())
    })
}

proptest! {
    #[test]
    fn b_against_a_mirrors_a_against_b((of, to) in figures()) {
        for compare in BOTH {
            let (there, back) = (compare(&of, &to), compare(&to, &of));
            prop_assert_eq!(there.verdict, mirrored(back.verdict));
            prop_assert!((there.p - back.p).abs() < 1e-12);
            if let (Some((low, high)), Some(other)) = (there.interval, back.interval) {
                let close = |a: f64, b: f64| (a * b - 1.0).abs() < 1e-6;
                prop_assert!(close(low, other.1) && close(high, other.0));
            }
        }
    }

    #[test]
    fn another_unit_changes_no_verdict((of, to) in figures(), unit in 1e-3..1e3f64) {
        let scaled = |values: &[f64]| values.iter().map(|one| one * unit).collect::<Vec<_>>();
        for compare in BOTH {
            let (ratio, other) = (compare(&of, &to), compare(&scaled(&of), &scaled(&to)));
            prop_assert_eq!(ratio.verdict, other.verdict);
            prop_assert!((ratio.p - other.p).abs() < 1e-12);
        }
    }

    #[test]
    fn what_becomes_faster_does_not_become_slower((of, to) in figures(), by in 1.0..3.0f64) {
        let faster: Vec<f64> = of.iter().map(|one| one * by).collect();
        for compare in BOTH {
            let (before, after) = (compare(&of, &to), compare(&faster, &to));
            prop_assert!(place(before.verdict) <= place(after.verdict));
        }
    }

    #[test]
    fn a_verdict_has_an_interval_on_its_side((of, to) in figures()) {
        for compare in BOTH {
            let ratio = compare(&of, &to);
            if let (Some((low, high)), true) = (ratio.interval, ratio.verdict.is_difference()) {
                let side = if ratio.verdict == Verdict::Better { low > 1.0 } else { high < 1.0 };
                prop_assert!(side, "{ratio:?}");
            }
        }
    }
}
