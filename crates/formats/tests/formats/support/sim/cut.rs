//! Power cuts: creates the files that a power cut at any instant of a run may leave, and checks
//! that they are a sound image with all durable data.

use super::bitmap;
use super::case::Made;
use super::model::{ANYTHING, Model, Value, ZERO};
use super::pages::Pages;
use super::recorder::Recorder;
use super::rng::Rng;
use super::run::{Run, Start};
use super::world::{Change, Event, Log, SECTOR, World, apply};
use fathom_core::Disk;
use fathom_formats::offline::check::{Options, check};
use fathom_testing::Tried;
use std::sync::Arc;

/// The fate of changes that are not flushed.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Lost,
    Kept,
    /// Each change is lost or kept at random.
    Some,
    /// All changes but one are kept, or only one is kept.
    AllBut(u64),
    Only(u64),
    /// Each sector of each change is lost or kept at random.
    Torn,
}

/// A recorded run in which the power can be cut.
pub struct Cuts<'a> {
    pub made: &'a Made,
    /// The files at the start of the log.
    pub before: &'a [Pages],
    pub log: &'a Log,
    pub model: &'a Model,
    pub seed: u64,
    /// Whether the whole disk is compared, and not only what guests have changed.
    pub whole: bool,
}

impl Cuts<'_> {
    /// Cuts the power `count` times, at random instants. The error describes the lost data.
    pub fn check(&self, count: usize) -> Result<(), String> {
        let mut rng = Rng::new(self.seed ^ 0xc07);
        let durable: Vec<u64> = self.log.events.iter().map(|e| self.durable(e)).collect();
        let (Some(first), Some(last)) = (self.log.events.first(), self.log.events.last()) else {
            return Ok(());
        };
        let (from, to) = (first.submitted, last.done + 1);
        let instants = (0..count).map(|_| from + rng.below(to - from + 1));
        let mut instants: Vec<u64> = instants.collect();
        instants.sort_unstable();
        let mut settled = self.before.to_vec();
        let mut next = 0;
        for instant in instants {
            while next < durable.len() && durable[next] <= instant {
                let event = &self.log.events[next];
                apply(&mut settled[event.file], event.at, &event.change);
                next += 1;
            }
            let fate = fate(&mut rng);
            let mut files = settled.clone();
            for (event, durable) in self.log.events[next..].iter().zip(&durable[next..]) {
                if event.submitted <= instant {
                    let must = *durable <= instant;
                    keep(&mut files[event.file], event, fate, must, &mut rng);
                }
            }
            let told = |problem| format!("cut at {instant}, {fate:?}: {problem}");
            self.verify(files, instant, &mut rng).map_err(told)?;
        }
        Ok(())
    }

    /// Returns the instant from which on the event is durable.
    fn durable(&self, event: &Event) -> u64 {
        let covers = |f: &&super::world::Flush| f.file == event.file && f.submitted > event.done;
        let flushed = self.log.flushes.iter().filter(covers).map(|f| f.done);
        match event.fua {
            true => event.done,
            false => flushed.min().unwrap_or(u64::MAX),
        }
    }

    fn verify(&self, files: Vec<Pages>, instant: u64, rng: &mut Rng) -> Result<(), String> {
        Tried::PowerCuts.count(1);
        let world = World::new(files, rng.next());
        self.made.prepare(&world);
        check_image(self.made, &world)?;
        if rng.one_in(100) {
            self.ask_qemu(&world)?;
        }
        let dirty = bitmap::dirty(self.made, &world)?;
        let start = self.made.start(&world, 1, rng.next());
        let mut run = Run::new(start).map_err(|e| e.to_string())?;
        run.strict = false;
        run.disk.activate().map_err(|e| e.to_string())?;
        let sectors = run.sectors();
        let sizes = self.model.sizes_after_cut(instant);
        if !sizes.is_empty() && !sizes.contains(&sectors) {
            return Err(format!("it has {sectors} sectors, not one of {sizes:?}"));
        }
        let durable = self.model.durable_at(instant);
        let mut now = self.model.initial().to_vec();
        let mut touched = match self.whole {
            true => (0..sectors).collect(),
            false => self.model.touched(),
        };
        touched.retain(|sector| *sector < sectors);
        for (first, n) in runs(&touched) {
            for (sector, value) in (first..).zip(run.read(first, n)?) {
                let allowed = self.model.after_cut(sector, instant, &durable);
                if !allowed.contains(&value) && !allowed.contains(&ANYTHING) {
                    let story = self.model.story(sector);
                    return Err(format!(
                        "sector {sector} is {value:#x}, not one of {allowed:x?}\n{story}"
                    ));
                }
                now[sector as usize] = value;
            }
        }
        if let Some(dirty) = dirty {
            bitmap::is_never_too_clean(&dirty, self.model.initial(), &now)?;
        }
        match rng.one_in(16) {
            true => self.go_on(&world, now, rng),
            false => Ok(()),
        }
    }

    /// Continues with the image after the cut: writes to it, and cuts the power again.
    fn go_on(&self, world: &Arc<World>, now: Vec<Value>, rng: &mut Rng) -> Result<(), String> {
        let mut below = self.made.below.clone();
        below.resize(now.len(), ZERO);
        let start = Start {
            model: Model::new(now, below).later(self.model),
            ..self.made.start(world, 2, rng.next())
        };
        let mut run = Run::new(start).map_err(|e| e.to_string())?;
        let before = world.state().files.clone();
        world.state().log = Some(Log::default());
        run.disk.activate().map_err(|e| e.to_string())?;
        run.requests(30);
        run.deactivate();
        check_image(self.made, world)?;
        let log = world.state().log.take().expect("put there above");
        let again = Cuts {
            made: self.made,
            before: &before,
            log: &log,
            model: &run.model,
            seed: rng.next(),
            whole: self.whole,
        };
        again.check(4).map_err(|problem| format!("then {problem}"))
    }

    fn ask_qemu(&self, world: &World) -> Result<(), String> {
        let dir = crate::support::dir();
        self.made.store(dir.path(), world);
        self.made.qemu_finds(dir.path(), true)
    }
}

/// Checks the image. Returns the number of leaks, or an error if there are other problems.
pub fn check_image(made: &Made, world: &Arc<World>) -> Result<u64, String> {
    if !made.case.format().has_tables() {
        return Ok(0);
    }
    let file = Recorder::new(world.clone(), 0, &made.names[0]);
    let mut lines = Vec::new();
    let mut say = |line: &str| lines.push(line.to_owned());
    let report = check(&*file, made.case.format(), &Options::default(), &mut say);
    let report = report.map_err(|error| format!("cannot be checked: {error}"))?;
    match report.corruptions + report.check_errors {
        0 => Ok(report.leaks),
        _ => Err(format!("is corrupt: {lines:#?}")),
    }
}

fn fate(rng: &mut Rng) -> Fate {
    match rng.below(10) {
        0 => Fate::Lost,
        1 => Fate::Kept,
        2 | 3 => Fate::AllBut(rng.next()),
        4 | 5 => Fate::Only(rng.next()),
        6 | 7 => Fate::Torn,
        _ => Fate::Some,
    }
}

/// Applies a change that may be on the disk, or must be.
fn keep(file: &mut Pages, event: &Event, fate: Fate, must: bool, rng: &mut Rng) {
    // About one event in ten is selected.
    let is_it = |which: u64| (event.done ^ which).is_multiple_of(11);
    let kept = match fate {
        _ if must => true,
        Fate::Lost => false,
        Fate::Kept => true,
        Fate::Some => rng.one_in(2),
        Fate::AllBut(which) => !is_it(which),
        Fate::Only(which) => is_it(which),
        Fate::Torn => return tear(file, event, rng),
    };
    if kept {
        apply(file, event.at, &event.change);
    }
}

/// Applies a random subset of the change's sectors.
fn tear(file: &mut Pages, event: &Event, rng: &mut Rng) {
    let len = match &event.change {
        Change::Write(bytes) => bytes.len() as u64,
        Change::Zero(len) => *len,
        Change::Len(_) => {
            return if rng.one_in(2) {
                apply(file, event.at, &event.change)
            };
        }
    };
    let (mut at, end) = (event.at, event.at + len);
    while at < end {
        let next = end.min(at / SECTOR * SECTOR + SECTOR);
        if rng.one_in(2) {
            match &event.change {
                Change::Write(bytes) => {
                    let part = (at - event.at) as usize..(next - event.at) as usize;
                    file.write(at, &bytes[part]);
                }
                _ => file.zero(at, next - at),
            }
        }
        at = next;
    }
}

/// Groups sorted sectors into runs of at most 256 consecutive ones.
fn runs(sectors: &[u64]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for sector in sectors {
        match runs.last_mut() {
            Some((first, n)) if *first + *n == *sector && *n < 256 => *n += 1,
            _ => runs.push((*sector, 1)),
        }
    }
    runs
}
