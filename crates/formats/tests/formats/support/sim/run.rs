//! A run: random requests by several workers. Each read is compared with the model.

use super::model::{ANYTHING, Kind, Model, SECTOR, Value, ZERO, fill, identify};
use super::recorder::{Names, Recorder};
use super::rng::Rng;
use super::worker::{Ask, DEPTH, Flight, Worker};
use super::world::{World, trace};
use fathom_core::extents::extents;
use fathom_core::{Disk, DiskError, Op};
use fathom_formats::served::{ImageDisk, ImageOptions, SideViewKind};
use fathom_testing::Tried;
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of steps in which no request ends. A request takes some hundreds.
const MAX_FRUITLESS_STEPS: u32 = 1 << 20;

/// A disk, its workers, and the model of its contents.
pub struct Run {
    pub world: Arc<World>,
    pub disk: ImageDisk,
    pub(super) options: ImageOptions,
    /// The bitmap's bits when the image was deactivated.
    pub(super) left: Option<Vec<u64>>,
    pub model: Model,
    pub(super) workers: Vec<Worker>,
    /// Number of workers that serve the guest.
    pub(super) guests: u64,
    pub(super) rng: Rng,
    /// Whether errors fail the test.
    pub strict: bool,
    /// Whether reads are not compared.
    pub blind: bool,
    /// Number of requests that failed.
    pub failures: u64,
    /// Number of steps since a request has ended.
    fruitless_steps: u32,
    /// First sectors of the parts of the disk that are used.
    pub windows: Vec<u64>,
    /// Percentage of requests that are flushes.
    pub flushes: u64,
    /// Percentage of the other requests that must be durable at once.
    fua: u64,
    /// Percentage of writes that cover a whole cluster, most of which are stored compressed. 0
    /// disables compression.
    pub compressed: u64,
    /// Size of a cluster in sectors.
    pub(super) cluster: u64,
    /// Size of a window in sectors.
    pub window: u64,
    wide: bool,
    /// Sector and instant: requests that end after the sector and begin up to the instant may fail,
    /// because the disk is being resized.
    pub(super) may_fail: Option<(u64, u64)>,
}

/// The parameters of a run.
pub struct Start<'a> {
    pub world: Arc<World>,
    /// Names of the world's files; the first one is the image.
    pub names: &'a [String],
    pub options: ImageOptions,
    pub model: Model,
    /// Cluster size in bytes.
    pub cluster: u64,
    /// Whether the whole disk is used.
    pub wide: bool,
    /// Whether compression is disabled regardless of the seed.
    pub plain: bool,
    pub workers: usize,
    pub seed: u64,
}

/// Opens the image in the world's first file.
pub fn open(
    world: &Arc<World>,
    names: &[String],
    options: &ImageOptions,
) -> Result<ImageDisk, DiskError> {
    let file = |n: usize| Recorder::new(world.clone(), n, &names[n]);
    let others = (1..names.len()).map(|n| (names[n].clone(), file(n)));
    let opener = Names(others.collect::<HashMap<_, _>>());
    ImageDisk::open(file(0), Arc::new(opener), options.clone())
}

impl Run {
    /// Creates a run. The disk is not active yet.
    pub fn new(start: Start) -> Result<Run, DiskError> {
        let mut disk = open(&start.world, start.names, &start.options)?;
        let options_of_run = start.options.clone();
        let mut rng = Rng::new(start.seed);
        let cluster = start.cluster / SECTOR as u64;
        let flushes = [0, 0, 3, 20][rng.below(4) as usize];
        let fua = [0, 0, 5, 30][rng.below(4) as usize];
        let compressed = match disk.compress_unit() {
            None => 0,
            Some(_) if start.plain => 0,
            // Large clusters take long to compress.
            Some(unit) if unit > 1 << 20 => 5,
            Some(_) => [0, 20, 80][rng.below(3) as usize],
        };
        if compressed > 0 {
            let options = ImageOptions {
                compress: true,
                ..start.options
            };
            disk = open(&start.world, start.names, &options)?;
        }
        // Depending on the job, every second worker copies on read, or the last ones commit.
        let count = start.workers;
        let guests = count
            - match start.options.side_view {
                None | Some(SideViewKind::CopyOnRead) => 0,
                Some(SideViewKind::Below(_)) => 1,
                Some(SideViewKind::Between { .. }) => 2,
            };
        let workers = (0..count).map(|n| {
            let other = match disk.reader() {
                Some(reader) if n == guests => Some(reader),
                _ if n >= guests || guests == count && n % 2 == 1 => disk.side_view(),
                _ => None,
            };
            match other {
                Some(other) => Worker::new(&*other, &start.world, n),
                None => Worker::new(&disk, &start.world, n),
            }
        });
        let mut run = Run {
            windows: Vec::new(),
            wide: start.wide,
            options: options_of_run,
            left: None,
            may_fail: None,
            workers: workers.collect(),
            guests: guests as u64,
            world: start.world,
            model: start.model,
            strict: true,
            blind: false,
            failures: 0,
            fruitless_steps: 0,
            flushes,
            fua,
            compressed,
            cluster,
            window: 0,
            disk,
            rng,
        };
        run.choose_windows();
        Ok(run)
    }

    pub(super) fn choose_windows(&mut self) {
        let (sectors, cluster, rng) = (self.sectors(), self.cluster, &mut self.rng);
        let window = match self.wide {
            true => sectors,
            false => (16 * cluster).clamp(64, 4096.max(3 * cluster)).min(sectors),
        };
        let windows = (0..3).map(|_| match rng.below(3) {
            0 => sectors - window,
            _ => rng.below(sectors - window + 1) / cluster * cluster,
        });
        self.windows = windows.collect();
        self.window = window;
    }

    /// The disk's present size in sectors.
    pub fn sectors(&self) -> u64 {
        self.disk.info().size / SECTOR as u64
    }

    /// Returns a random number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    /// Submits `n` random requests, most of them concurrently.
    pub fn requests(&mut self, n: usize) {
        Tried::Requests.count(n as u64);
        let mut left = n;
        while left > 0 {
            let depth = 1 + self.rng.below(DEPTH as u64) as usize;
            for _ in 0..1 + self.rng.below(40) {
                let worker = self.rng.below(self.guests) as usize;
                if left > 0 && self.workers[worker].in_flight() < depth && !self.rng.one_in(3) {
                    let ask = self.random();
                    self.submit(worker, ask);
                    left -= 1;
                } else {
                    self.step();
                }
            }
        }
    }

    /// Starts reads, discards or overwrites their clusters while they are in flight, and submits
    /// `n` more requests before the reads end.
    pub fn outlived_by_reads(&mut self, n: usize) {
        self.drain();
        self.world.state().holding = true;
        let places: Vec<_> = (0..1 + self.rng.below(3))
            .map(|_| self.whole_cluster())
            .collect();
        for (first, sectors) in &places {
            let sector = first + self.rng.below(*sectors);
            self.submit(0, Ask::plain(Op::Read, sector, 1));
        }
        self.world.state().holding = false;
        for (first, sectors) in places {
            let mut ask = Ask::plain(Op::Discard, first, sectors);
            match self.rng.below(3) {
                0 => {}
                1 => (ask.op, ask.unmap) = (Op::WriteZeroes, true),
                _ => ask.op = Op::Write,
            }
            self.submit(0, ask);
        }
        for _ in 0..2 {
            while self.step() {}
            self.submit(0, Ask::plain(Op::Flush, 0, 0));
        }
        self.requests(n);
        self.world.state().let_go();
        self.drain();
    }

    /// Carries out `n` storage operations, or fewer if none is pending.
    pub fn steps(&mut self, n: u64) {
        for _ in 0..n {
            self.step();
        }
    }

    /// Kills the server: each pending operation is done, done in part, or not done. The run cannot
    /// be used any more.
    pub fn abandon(&mut self) {
        loop {
            let mut state = self.world.state();
            let n = state.pending.len() as u64;
            if n == 0 {
                return;
            }
            let pending = state.pending.swap_remove(self.rng.below(n) as usize);
            drop(state);
            self.workers[pending.worker].abandon(&self.world, &pending);
        }
    }

    /// Waits until all requests in flight have ended.
    pub fn drain(&mut self) {
        while self.workers.iter().any(|w| w.in_flight() > 0) {
            if !self.goes_on() {
                panic!("requests that never end: {:?}", self.asks());
            }
        }
        // Carries out discards, which no request waits for.
        while self.step() {}
    }

    /// Submits these requests in any order, with as many in flight as possible.
    pub fn all(&mut self, asks: impl Iterator<Item = Ask>) {
        for ask in asks {
            let worker = self.rng.below(self.guests) as usize;
            while self.workers[worker].in_flight() == DEPTH {
                assert!(self.goes_on(), "requests that never end");
            }
            self.submit(worker, ask);
        }
        self.drain();
    }

    /// Submits one request and waits for it. Returns 0, or 1 if it failed.
    pub fn alone(&mut self, ask: Ask) -> i32 {
        let before = self.failures;
        self.submit(0, ask);
        self.drain();
        (self.failures > before).into()
    }

    pub fn flush(&mut self) -> i32 {
        self.alone(Ask::plain(Op::Flush, 0, 0))
    }

    pub fn activate(&mut self) {
        self.disk.activate().expect("it can be activated");
        self.take_bitmap();
    }

    /// Deactivates the disk. Returns whether this succeeded.
    pub fn deactivate(&mut self) -> bool {
        self.drain();
        let submitted = self.world.tick();
        match self.deactivate_disk() {
            Ok(()) => {
                let done = self.world.tick();
                self.model.flushed(submitted, done);
                true
            }
            Err(error) => {
                assert!(!self.strict, "{error}");
                false
            }
        }
    }

    /// Reads sectors and returns their contents.
    pub fn read(&mut self, first: u64, sectors: u64) -> Result<Vec<Value>, String> {
        let mut bytes = vec![0; sectors as usize * SECTOR];
        self.read_bytes(first, &mut bytes)?;
        let sectors = bytes.chunks(SECTOR).zip(first..);
        sectors
            .map(|(bytes, sector)| {
                identify(bytes, sector).map_err(|what| format!("sector {sector} is {what}"))
            })
            .collect()
    }

    fn read_bytes(&mut self, first: u64, out: &mut [u8]) -> Result<(), String> {
        let ask = Ask::plain(Op::Read, first, (out.len() / SECTOR) as u64);
        let submitted = self.world.tick();
        let flight = Flight {
            ask,
            submitted,
            action: None,
            buffer: vec![0xa5; out.len()],
            goes_below: false,
        };
        self.workers[0].submit(flight, &mut self.rng);
        for _ in 0..200_000 {
            self.look_again();
            if let Some((flight, errno)) = self.workers[0].reap().pop() {
                out.copy_from_slice(&flight.buffer);
                return match errno {
                    0 => Ok(()),
                    errno => Err(format!("reading sector {first} on fails: {errno}")),
                };
            }
            self.carry_out_one();
        }
        Err(format!("reading sector {first} on never ends"))
    }

    /// Compares every sector with the model. Returns the contents.
    pub fn compare_all(&mut self) -> Vec<Value> {
        let now = self.world.tick();
        let sectors = self.sectors();
        let mut holds = Vec::with_capacity(sectors as usize);
        for first in (0..sectors).step_by(256) {
            let n = (sectors - first).min(256);
            let values = self.read(first, n);
            let values = values.unwrap_or_else(|problem| self.fail(&problem, first));
            for (sector, value) in (first..).zip(&values) {
                self.compare(sector, *value, now);
            }
            holds.extend(values);
        }
        holds
    }

    fn compare(&self, sector: u64, value: Value, since: u64) {
        let allowed = self.model.readable(sector, since);
        if !allowed.contains(&value) && !allowed.contains(&ANYTHING) {
            let problem = format!("sector {sector} reads {value:#x}, not one of {allowed:x?}");
            self.fail(&problem, sector);
        }
    }

    fn fail(&self, problem: &str, sector: u64) -> ! {
        panic!("{problem}\n{}", self.model.story(sector))
    }

    pub fn submit(&mut self, worker: usize, ask: Ask) {
        let submitted = self.world.tick();
        let mut buffer = Vec::new();
        if matches!(ask.op, Op::Read | Op::Write) {
            buffer.resize(ask.sectors as usize * SECTOR, 0xa5);
        } else if ask.op == Op::BlockStatus {
            buffer.resize(8 * (1 + self.rng.below(8) as usize), 0xa5);
        }
        let kind = match ask.op {
            Op::Write => Some(Kind::Write),
            Op::WriteZeroes => Some(Kind::Zero),
            Op::Discard => Some(Kind::Discard),
            _ => None,
        };
        let action = kind.map(|kind| {
            let begun = self
                .model
                .begin(kind, ask.fua, submitted, ask.first, ask.sectors);
            if ask.op == Op::Write {
                fill(&mut buffer, ask.first, begun.1);
            }
            begun.0
        });
        let flight = Flight {
            ask,
            submitted,
            action,
            buffer,
            goes_below: false,
        };
        self.workers[worker].submit(flight, &mut self.rng);
        self.look_again();
        self.reap();
    }

    /// Steps until something happens. Returns false if nothing happens any more. A worker may wake
    /// another one that has already been polled, so only many steps without effect mean that
    /// nothing is left to do.
    pub(super) fn goes_on(&mut self) -> bool {
        (0..100).any(|_| self.step())
    }

    /// Carries out one pending operation of a storage or one job of a helper, and takes the
    /// requests that have ended. Returns false if nothing happened.
    ///
    /// # Panics
    ///
    /// Panics if the requests in flight never end, however many operations are carried out for
    /// them.
    pub(super) fn step(&mut self) -> bool {
        let any = self.carry_out_one();
        self.look_again();
        let has_ended = self.reap();
        self.fruitless_steps += 1;
        if has_ended || self.workers.iter().all(|worker| worker.in_flight() == 0) {
            self.fruitless_steps = 0;
        }
        if self.fruitless_steps == MAX_FRUITLESS_STEPS {
            panic!("requests that never end: {:?}", self.asks());
        }
        has_ended || any
    }

    /// The requests in flight.
    fn asks(&self) -> Vec<Ask> {
        let flights = self.workers.iter().flat_map(|worker| worker.flights());
        flights.map(|flight| flight.ask.clone()).collect()
    }

    fn carry_out_one(&mut self) -> bool {
        let jobs = self.disk.jobs() as u64;
        let pending = {
            let mut state = self.world.state();
            let n = state.pending.len() as u64;
            if n + jobs == 0 {
                return false;
            }
            let chosen = self.rng.below(n + jobs);
            if chosen >= n {
                drop(state);
                return self.disk.help((chosen - n) as usize);
            }
            let mut chosen = self.rng.below(n) as usize;
            for _ in 0..8 {
                if state.pending[chosen].slow && !self.rng.one_in(100) {
                    chosen = self.rng.below(n) as usize;
                }
            }
            state.pending.swap_remove(chosen)
        };
        self.workers[pending.worker].carry_out(&self.world, &pending);
        true
    }

    fn look_again(&mut self) {
        self.workers.iter_mut().for_each(Worker::look_again);
    }

    fn reap(&mut self) -> bool {
        let done = self.workers.iter_mut().flat_map(Worker::reap);
        let done: Vec<_> = done.collect();
        let any = !done.is_empty();
        for (flight, errno) in done {
            let now = self.world.tick();
            let end = flight.ask.first + flight.ask.sectors;
            let may_fail = |(sector, until)| end > sector && flight.submitted <= until;
            let is_expected = errno == libc::EIO && self.may_fail.is_some_and(may_fail);
            let is_bad = self.strict && errno != 0 && !is_expected;
            assert!(!is_bad, "{:?}: {errno}", flight.ask);
            self.failures += u64::from(errno != 0);
            trace(|| {
                format!(
                    "{now} done {errno} {:?} since {}",
                    flight.ask, flight.submitted
                )
            });
            if let Some(action) = flight.action {
                self.model.end(action, now, errno != 0);
            }
            match flight.ask.op {
                Op::Flush if errno == 0 && !flight.goes_below => {
                    self.model.flushed(flight.submitted, now)
                }
                // A committing worker reads other contents than the guest sees.
                Op::Read if errno == 0 && self.disk.reader().is_some() && flight.goes_below => {
                    self.commit(flight);
                }
                Op::Read if errno == 0 && !self.blind => {
                    self.check_read(&flight);
                    self.commit(flight);
                }
                Op::BlockStatus if errno == 0 && !self.blind => self.check_status(&flight),
                _ => {}
            }
        }
        any
    }

    fn check_read(&self, flight: &Flight) {
        let sectors = flight.buffer.chunks(SECTOR).zip(flight.ask.first..);
        for (bytes, sector) in sectors {
            match identify(bytes, sector) {
                Ok(value) => self.compare(sector, value, flight.submitted),
                Err(what) => self.fail(&format!("sector {sector} reads as {what}"), sector),
            }
        }
    }

    /// Checks that every sector reported as zeroes may be zeroes.
    fn check_status(&self, flight: &Flight) {
        let mut sector = flight.ask.first;
        for (status, len) in extents(&flight.buffer) {
            assert_eq!(len % SECTOR as u64, 0, "{:?}", flight.ask);
            let end = sector + len / SECTOR as u64;
            while sector < end {
                let allowed = self.model.readable(sector, flight.submitted);
                if status.zero && !allowed.contains(&ZERO) {
                    self.fail("data is said to be zeroes", sector);
                }
                sector += 1;
            }
        }
        let (first, last) = (flight.ask.first, flight.ask.first + flight.ask.sectors);
        assert!(sector > first && sector <= last, "{:?}", flight.ask);
    }

    pub(super) fn random(&mut self) -> Ask {
        let op = match self.rng.below(19) {
            18 => Op::BlockStatus,
            _ if self.rng.below(100) < self.flushes => Op::Flush,
            0..9 => Op::Write,
            9..14 => Op::Read,
            14 | 15 => Op::WriteZeroes,
            _ => Op::Discard,
        };
        if op == Op::Flush {
            return Ask::plain(op, 0, 0);
        }
        let compressed = op == Op::Write && self.rng.below(100) < self.compressed;
        let (first, sectors) = match compressed && !self.rng.one_in(8) {
            true => self.whole_cluster(),
            false => self.place(matches!(op, Op::WriteZeroes | Op::Discard)),
        };
        Ask {
            op,
            first,
            sectors,
            fua: !matches!(op, Op::Read | Op::BlockStatus) && self.rng.below(100) < self.fua,
            unmap: self.rng.one_in(2),
        }
    }

    /// Returns a whole cluster that is at least partly within one of the windows.
    fn whole_cluster(&mut self) -> (u64, u64) {
        let which = self.rng.below(self.windows.len() as u64) as usize;
        let first = self.windows[which] + self.rng.below(self.window);
        let first = first / self.cluster * self.cluster;
        (
            first,
            self.cluster.min(self.sectors().max(first + 1) - first),
        )
    }

    /// Returns a range in one of the windows, more often whole clusters if `whole` is set.
    pub(super) fn place(&mut self, whole: bool) -> (u64, u64) {
        let which = self.rng.below(self.windows.len() as u64) as usize;
        let start = self.windows[which];
        let end = start + self.window;
        let mut first = start + self.rng.below(self.window);
        let cluster = self.cluster;
        let sectors = match self.rng.below(10) {
            _ if self.window > 8192 => 1 + self.rng.below(256),
            0..6 if !whole => 1 + self.rng.below(8),
            6..9 if !whole => 1 + self.rng.below((2 * cluster).min(256)),
            0..2 => 1 + self.rng.below((3 * cluster).clamp(64, 1024)),
            _ => {
                first = (first / cluster * cluster).max(start);
                cluster * (1 + self.rng.below((2048 / cluster).clamp(1, 3)))
            }
        };
        (first, sectors.min(end - first))
    }
}
