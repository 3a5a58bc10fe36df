//! Which files a thread has, and what it does to them next: nothing here touches a disk.
//!
//! All of it follows from the options, so that the same seed does the same again, and what must be
//! on the disk afterwards can be told without looking.

use super::mail::{Kind, Weights, draw_size};
use super::options::Options;
use crate::workload::{Rng, mix};

/// Files that are drawn to find one with room for an append.
const TRIES: u32 = 8;
/// What is added to the seed for the sizes of the first files.
const SIZES_SEED: u64 = 0x7369_7a65;

/// A file that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct File {
    /// Never used twice in a run.
    pub id: u64,
    pub size: u32,
    pub dir: u16,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub kind: Kind,
    /// As it is afterwards, or as it was if it is deleted.
    pub file: File,
    /// The first byte that is written, by a create or an append.
    pub from: u32,
    /// Of the random numbers that the operation needs.
    pub seed: u64,
}

/// One thread's files.
#[derive(Debug)]
pub struct Model {
    rng: Rng,
    weights: Weights,
    files: Vec<File>,
    dirs: Vec<u16>,
    /// Files at most.
    limit: usize,
    next_id: u64,
    threads: u64,
    sizes: Sizes,
    append: u32,
}

/// Sizes as the file system can store them.
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

/// The files that there are before the load, of all threads, in order of their ids; their sizes
/// are multiples of `align`, a power of two that divides the block size.
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
    /// Thread `thread`'s part of the [`first_files`].
    pub fn new(options: &Options, thread: u16, align: u32) -> Model {
        let is_mine = |dir: u16| dir % options.threads == thread;
        let mine = || first_files(options, align).filter(|f| is_mine(f.dir));
        let limit = (2 * mine().count()).max(2);
        // Under load, nothing is allocated.
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

    /// Those that exist, in no particular order.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The directories of this thread.
    pub fn dirs(&self) -> &[u16] {
        &self.dirs
    }

    /// Draws an operation, and takes it for done. What cannot be done is done otherwise: without
    /// files, everything is a create; with twice the first files, a create is a delete; and so is
    /// an append where file after file has no room, which makes some.
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

    /// The place of a file; there must be one.
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

    /// The files that a list of steps leaves, by what the steps say; each must be possible.
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
            // Not only the sizes of the first files.
            prop_assert!(steps(&o).iter().zip(steps(&other)).all(|(a, b)| a.seed != b.seed));
        }
    }

    #[test]
    fn kinds_come_as_often_as_their_weights_say() {
        let mut model = Model::new(&Options::new("/nowhere"), 0, 512);
        let mut counts = [0u32; 5];
        (0..100_000).for_each(|_| counts[model.next().kind as usize] += 1);
        for (count, percent) in counts.into_iter().zip(Weights::default().0) {
            // Five standard deviations.
            let (n, p) = (1e5, f64::from(percent) / 100.0);
            let off = (f64::from(count) - n * p).abs();
            assert!(off < 5.0 * (n * p * (1.0 - p)).sqrt(), "{counts:?}");
        }
    }
}
