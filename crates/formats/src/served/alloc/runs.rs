//! A set of clusters, stored as runs.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of clusters. The set's memory depends on the number of runs, not on their length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::served) struct Runs(BTreeMap<u64, u64>);

impl Runs {
    pub(in crate::served) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds clusters, none of which is in the set.
    pub(in crate::served) fn insert(&mut self, run: Range<u64>) {
        debug_assert!(!run.is_empty() && self.overlapping(run.clone()).next().is_none());
        let Range { mut start, mut end } = run;
        if let Some((before, until)) = self.0.range(..start).next_back()
            && *until == start
        {
            start = *before;
        }
        if let Some(until) = self.0.remove(&end) {
            end = until;
        }
        self.0.insert(start, end);
    }

    /// Removes clusters, all of which are in the set.
    pub(in crate::served) fn remove(&mut self, run: &Range<u64>) {
        let found = self.0.range(..=run.start).next_back();
        let Some((start, end)) = found.map(|(start, end)| (*start, *end)) else {
            return debug_assert!(false, "{run:?} is not in the set");
        };
        debug_assert!(end >= run.end);
        self.0.remove(&start);
        if start < run.start {
            self.0.insert(start, run.start);
        }
        if run.end < end {
            self.0.insert(run.end, end);
        }
    }

    /// Returns all runs, in order.
    pub(in crate::served) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(start, end)| *start..*end)
    }

    /// Returns the runs that have clusters in this range, cut to it.
    pub(in crate::served) fn overlapping(
        &self,
        range: Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.0.range(..range.start).next_back();
        let all = first.into_iter().chain(self.0.range(range.clone()));
        let cut = move |(start, end): (&u64, &u64)| range.start.max(*start)..range.end.min(*end);
        all.map(cut).filter(|run| !run.is_empty())
    }
}

impl IntoIterator for Runs {
    type Item = Range<u64>;
    type IntoIter = std::vec::IntoIter<Range<u64>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter().collect::<Vec<_>>().into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn adjacent_clusters_are_one_run() {
        let mut runs = Runs::default();
        for cluster in [5, 3, 4, 9, 8, 1] {
            runs.insert(cluster..cluster + 1);
        }
        let all: Vec<_> = runs.iter().collect();
        assert_eq!(all, [1..2, 3..6, 8..10]);
        runs.remove(&(4..5));
        let all: Vec<_> = runs.overlapping(2..9).collect();
        assert_eq!(all, [3..4, 5..6, 8..9]);
    }

    proptest! {
        #[test]
        fn runs_are_the_set_of_their_clusters(
            steps in prop::collection::vec((any::<bool>(), 0u64..60, 1u64..6), 1..60),
            window in (0u64..60, 0u64..60),
        ) {
            let (mut runs, mut model) = (Runs::default(), BTreeSet::new());
            for (adds, start, len) in steps {
                let run = start..start + len;
                if adds && run.clone().all(|cluster| !model.contains(&cluster)) {
                    runs.insert(run.clone());
                    model.extend(run);
                } else if !adds && run.clone().all(|cluster| model.contains(&cluster)) {
                    runs.remove(&run);
                    run.for_each(|cluster| { model.remove(&cluster); });
                }
                let all: Vec<_> = runs.iter().collect();
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
                let clusters: BTreeSet<_> = all.into_iter().flatten().collect();
                prop_assert_eq!(&clusters, &model);
            }
            let window = window.0.min(window.1)..window.0.max(window.1);
            let seen: Vec<_> = runs.overlapping(window.clone()).flatten().collect();
            let expected: Vec<_> = model.range(window).copied().collect();
            prop_assert_eq!(seen, expected);
        }
    }
}
