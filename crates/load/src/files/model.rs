//! Model of a thread's files and of its next operations. The model does not access the disk.
//!
//! The model depends only on the options. Therefore the same seed repeats the same operations, and
//! the expected contents of the disk are known without reading it.

use super::mail::{Kind, Weights, draw_size};
use super::options::Options;
use crate::workload::{Rng, mix};

/// Number of files drawn to find one that can be appended to.
const TRIES: u32 = 8;
/// Added to the seed for the sizes of the initial files.
const SIZES_SEED: u64 = 0x7369_7a65;

/// An existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct File {
    /// Unique in a run.
    pub id: u64,
    pub size: u32,
    pub dir: u16,
}

/// An operation to perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub kind: Kind,
    /// The file after the operation or, for a delete, before it.
    pub file: File,
    /// Offset of the first byte that a create or an append writes.
    pub from: u32,
    /// Seed of the random numbers that the operation needs.
    pub seed: u64,
}

/// The files of one thread.
#[derive(Debug)]
pub struct Model {
    rng: Rng,
    weights: Weights,
    files: Vec<File>,
    dirs: Vec<u16>,
    /// Maximum number of files.
    limit: usize,
    next_id: u64,
    threads: u64,
    sizes: Sizes,
    append: u32,
}

/// Sizes that the file system can store.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    align: u32,
    max: u32,
}

impl Sizes {
    fn new(options: &Options, align: u32) -> Sizes {
        Sizes {
            align,
            max: options.max_size.next_multiple_of(align),
        }
    }

    fn draw(self, rng: &mut Rng) -> u32 {
        draw_size(rng, self.max).next_multiple_of(self.align)
    }
}

/// Returns the files of all threads before the load, in the order of their IDs. Sizes are multiples
/// of `align`, a power of two that divides the block size.
pub fn first_files(options: &Options, align: u32) -> impl Iterator<Item = File> {
    let sizes = Sizes::new(options, align);
    let mut rng = Rng::new(options.seed ^ mix(SIZES_SEED));
    let dirs = u64::from(options.dirs);
    (0..u64::from(options.files)).map(move |id| File {
        id,
        size: sizes.draw(&mut rng),
        dir: (id % dirs) as u16,
    })
}

impl Model {
    /// Creates the model of thread `thread`, with its part of the [`first_files`].
    pub fn new(options: &Options, thread: u16, align: u32) -> Model {
        let is_mine = |dir: u16| dir % options.threads == thread;
        let mine = || first_files(options, align).filter(|f| is_mine(f.dir));
        let limit = (2 * mine().count()).max(2);
        // Allocate memory for all files now, so that the load does not allocate.
        let mut files = Vec::with_capacity(limit);
        files.extend(mine());
        Model {
            rng: Rng::new(options.seed ^ mix(u64::from(thread) + 1)),
            weights: options.weights,
            files,
            dirs: (0..options.dirs).filter(|dir| is_mine(*dir)).collect(),
            limit,
            next_id: u64::from(options.files) + u64::from(thread),
            threads: options.threads.into(),
            sizes: Sizes::new(options, align),
            append: options.bs,
        }
    }

    /// Returns the existing files, in no particular order.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Returns the directories of this thread.
    pub fn dirs(&self) -> &[u16] {
        &self.dirs
    }

    /// Draws an operation, and applies it to the model. An impossible operation is replaced:
    /// without files, every operation becomes a create. At the maximum number of files, a create
    /// becomes a delete. If several drawn files cannot grow, an append becomes a delete, which
    /// makes space.
    pub fn next(&mut self) -> Step {
        match self.weights.draw(&mut self.rng) {
            _ if self.files.is_empty() => self.create(),
            Kind::Create if self.files.len() < self.limit => self.create(),
            Kind::Create | Kind::Delete => self.delete(),
            Kind::Append => self.append(),
            kind @ (Kind::Open | Kind::Read) => {
                let at = self.any();
                self.step(kind, self.files[at], 0)
            }
        }
    }

    fn step(&mut self, kind: Kind, file: File, from: u32) -> Step {
        Step {
            kind,
            file,
            from,
            seed: self.rng.next(),
        }
    }

    /// Returns the index of a random file. At least one file must exist.
    fn any(&mut self) -> usize {
        self.rng.below(self.files.len() as u64) as usize
    }

    fn create(&mut self) -> Step {
        let dir = self.rng.below(self.dirs.len() as u64) as usize;
        let file = File {
            id: self.next_id,
            size: self.sizes.draw(&mut self.rng),
            dir: self.dirs[dir],
        };
        self.next_id += self.threads;
        self.files.push(file);
        self.step(Kind::Create, file, 0)
    }

    fn delete(&mut self) -> Step {
        let at = self.any();
        let file = self.files.swap_remove(at);
        self.step(Kind::Delete, file, 0)
    }

    fn append(&mut self) -> Step {
        for _ in 0..TRIES {
            let at = self.any();
            let file = &mut self.files[at];
            let room = self.sizes.max - file.size;
            if room > 0 {
                let from = file.size;
                file.size += room.min(self.append);
                let file = *file;
                return self.step(Kind::Append, file, from);
            }
        }
        self.delete()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::files::mail::MIN_SIZE;

    fn options() -> impl Strategy<Value = Options> {
        let weights = prop::array::uniform5(0..20u16).prop_map(Weights);
        let sets = (1..8u16, 0..200u32, 0..8u16, 2..200u32, 1..40u32);
        (weights, sets, any::<u64>()).prop_map(
            |(weights, (threads, files, dirs, kib, bs), seed)| Options {
                threads,
                files: files + u32::from(threads),
                dirs: dirs + threads,
                max_size: kib * 512 + MIN_SIZE,
                bs: bs * 4096,
                weights: if weights.sum() == 0 {
                    Weights::default()
                } else {
                    weights
                },
                seed,
                ..Options::new("/nowhere")
            },
        )
    }

    /// Returns the files that remain after a list of steps. Checks that each step is possible.
    fn replay(first: Vec<File>, steps: &[Step]) -> BTreeMap<u64, File> {
        let mut files: BTreeMap<u64, File> = first.into_iter().map(|f| (f.id, f)).collect();
        for step in steps {
            let (file, before) = (step.file, files.get(&step.file.id).copied());
            match step.kind {
                Kind::Create => assert_eq!(before, None, "{step:?}"),
                Kind::Append => {
                    let expected = File {
                        size: step.from,
                        ..file
                    };
                    assert_eq!(before, Some(expected), "{step:?}");
                    assert!(step.from < file.size, "{step:?}");
                }
                _ => assert_eq!(before, Some(file), "{step:?}"),
            }
            match step.kind {
                Kind::Delete => files.remove(&file.id),
                _ => files.insert(file.id, file),
            };
        }
        files
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn the_threads_share_the_files_and_never_meet(o in options(), align in 0..4u32) {
            let align = 512 << align;
            o.validate().unwrap();
            let mut seen = BTreeMap::new();
            let mut first: Vec<File> = Vec::new();
            for thread in 0..o.threads {
                let mut model = Model::new(&o, thread, align);
                first.extend(model.files());
                prop_assert!(!model.files().is_empty());
                let steps = (0..300).map(|_| model.next()).collect::<Vec<_>>();
                let own = steps.iter().map(|s| s.file).chain(model.files().iter().copied());
                for file in own {
                    prop_assert_eq!(*seen.entry(file.id).or_insert(thread), thread);
                    prop_assert!(model.dirs().contains(&file.dir));
                    prop_assert_eq!(file.dir % o.threads, thread);
                }
            }
            first.sort();
            prop_assert!(first.into_iter().eq(first_files(&o, align)));
        }

        #[test]
        fn every_step_is_possible_and_keeps_the_bounds(o in options(), align in 0..4u32) {
            let align = 512u32 << align;
            let max = o.max_size.next_multiple_of(align);
            for thread in 0..o.threads {
                let mut model = Model::new(&o, thread, align);
                let first = model.files().to_vec();
                let limit = 2 * first.len();
                let mut steps = Vec::new();
                for _ in 0..300 {
                    let step = model.next();
                    prop_assert!(o.weights.0[step.kind as usize] > 0
                        || [Kind::Create, Kind::Delete].contains(&step.kind));
                    prop_assert!(step.file.size >= MIN_SIZE && step.file.size <= max);
                    prop_assert!(step.file.size.is_multiple_of(align) && step.from.is_multiple_of(align));
                    prop_assert!(model.files().len() <= limit);
                    steps.push(step);
                }
                let mut files = model.files().to_vec();
                files.sort();
                prop_assert!(replay(first, &steps).into_values().eq(files));
            }
        }

        #[test]
        fn a_seed_does_the_same_again_and_another_something_else(o in options()) {
            let steps = |o: &Options| {
                let mut model = Model::new(o, 0, 512);
                (0..100).map(|_| model.next()).collect::<Vec<_>>()
            };
            prop_assert_eq!(steps(&o), steps(&o));
            let other = Options { seed: o.seed ^ 1, ..o.clone() };
            // The operations themselves must differ, not only the sizes of the initial files.
            prop_assert!(steps(&o).iter().zip(steps(&other)).all(|(a, b)| a.seed != b.seed));
        }
    }

    #[test]
    fn kinds_come_as_often_as_their_weights_say() {
        let mut model = Model::new(&Options::new("/nowhere"), 0, 512);
        let mut counts = [0u32; 5];
        (0..100_000).for_each(|_| counts[model.next().kind as usize] += 1);
        for (count, percent) in counts.into_iter().zip(Weights::default().0) {
            // Allow five standard deviations.
            let (n, p) = (1e5, f64::from(percent) / 100.0);
            let off = (f64::from(count) - n * p).abs();
            assert!(off < 5.0 * (n * p * (1.0 - p)).sqrt(), "{counts:?}");
        }
    }
}
