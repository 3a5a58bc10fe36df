//! A model of what each sector of a disk may contain.

use super::rng::Rng;
use std::collections::HashMap;

/// Size of a sector in bytes.
pub const SECTOR: usize = 512;

/// The contents of a sector: zeroes, or the pattern with this number.
pub type Value = u32;
pub const ZERO: Value = 0;

/// Numbers from this one on are the contents of images before the run.
pub const BEFORE: Value = 0x8000_0000;

const MAGIC: u32 = 0xfa7b_0a57;

/// Period of the values with a pattern that cannot be compressed: each period has one such value.
const NOISY: Value = 5;

fn is_noisy(value: Value) -> bool {
    value % NOISY == NOISY - 1 && value < BEFORE
}

/// Fills a sector with noise. The first word is the sector's number and value, scrambled by an
/// invertible multiplication.
fn noise(sector: &mut [u8], number: u64, value: Value) {
    let name = u64::from(value) << 32 | number;
    let mut rng = Rng::new(name);
    for word in sector.chunks_mut(8) {
        word.copy_from_slice(&rng.next().to_le_bytes());
    }
    sector[..8].copy_from_slice(&name.wrapping_mul(SCRAMBLE).to_le_bytes());
}

const SCRAMBLE: u64 = 0x9e37_79b9_7f4a_7c15;
const UNSCRAMBLE: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(SCRAMBLE.wrapping_mul(UNSCRAMBLE) == 1);

/// Fills sectors, starting at number `first`.
pub fn fill(bytes: &mut [u8], first: u64, value: Value) {
    if value == ZERO {
        return bytes.fill(0);
    }
    for (n, sector) in bytes.chunks_mut(SECTOR).enumerate() {
        if is_noisy(value) {
            noise(sector, first + n as u64, value);
            continue;
        }
        for (m, word) in sector.chunks_mut(16).enumerate() {
            word[..8].copy_from_slice(&(first + n as u64).to_le_bytes());
            word[8..12].copy_from_slice(&value.to_le_bytes());
            word[12..].copy_from_slice(&(MAGIC ^ m as u32).to_le_bytes());
        }
    }
}

/// Returns the contents of a sector. The error is for people.
pub fn identify(bytes: &[u8], sector: u64) -> Result<Value, String> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(ZERO);
    }
    let first = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let named = first.wrapping_mul(UNSCRAMBLE);
    let (place, value) = match (named & u64::from(u32::MAX), (named >> 32) as Value) {
        (place, value) if place == sector && is_noisy(value) => (place, value),
        _ => {
            let value = bytes[8..12].try_into().expect("four bytes");
            (first, Value::from_le_bytes(value))
        }
    };
    let mut expected = [0; SECTOR];
    fill(&mut expected, place, value);
    if bytes != expected {
        return Err(format!("garbage: {:02x?}...", &bytes[..16]));
    }
    match place == sector {
        true => Ok(value),
        false => Err(format!("the data {value:#x} of sector {place}")),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Write,
    Zero,
    Discard,
    /// The sectors are beyond the end of a disk that is being shrunk.
    Cut,
}

/// Any contents, of a sector that is being cut off.
pub const ANYTHING: Value = Value::MAX;

/// A request that changes sectors.
#[derive(Clone, Debug)]
pub struct Action {
    pub kind: Kind,
    pub fua: bool,
    pub submitted: u64,
    /// The instant at which the request ended, successfully or not.
    pub done: Option<u64>,
    /// Whether the request failed, so that its effect is unknown.
    pub failed: bool,
}

#[derive(Clone, Copy)]
struct Flush {
    submitted: u64,
    done: u64,
}

/// The model of one disk.
pub struct Model {
    /// The number after which the values of writes begin.
    after: Value,
    /// Initial contents by sector.
    initial: Vec<Value>,
    /// Contents of the backing image by sector.
    below: Vec<Value>,
    pub actions: Vec<Action>,
    /// The actions on each changed sector, in order.
    history: HashMap<u64, Vec<u32>>,
    flushes: Vec<Flush>,
    /// Sizes in sectors, each with the instant at which the resize began and the instant from which
    /// on the size is durable.
    sizes: Vec<(u64, Option<u64>, u64)>,
}

impl Model {
    pub fn new(initial: Vec<Value>, below: Vec<Value>) -> Model {
        assert_eq!(initial.len(), below.len());
        Model {
            after: 0,
            initial,
            below,
            actions: Vec::new(),
            history: HashMap::new(),
            flushes: Vec::new(),
            sizes: Vec::new(),
        }
    }

    /// Extends the model to `sectors` sectors, so that the disk may grow. New sectors are zeroes.
    pub fn with_room(mut self, sectors: u64) -> Model {
        self.sizes.push((0, Some(0), self.sectors()));
        self.initial.resize(sectors as usize, ZERO);
        self.below.resize(sectors as usize, ZERO);
        self
    }

    /// Begins a resize. Returns a function to be called at its end, with true if the disk has the
    /// new size.
    pub fn resizing(
        &mut self,
        now: u64,
        from: u64,
        to: u64,
    ) -> impl FnOnce(&mut Model, u64, bool) + use<> {
        let size = self.sizes.len();
        self.sizes.push((now, None, to));
        let lost = from.saturating_sub(to);
        let (cut, _) = self.begin(Kind::Cut, false, now, to, lost);
        move |model, now, has_it| {
            model.end(cut, now, !has_it);
            if has_it {
                model.sizes[size].1 = Some(now);
                let (zero, _) = model.begin(Kind::Zero, true, now + 1, to, lost);
                model.end(zero, now + 1, false);
            }
        }
    }

    /// Returns the sizes that the disk may have after a power cut.
    pub fn sizes_after_cut(&self, cut: u64) -> Vec<u64> {
        let begun = self.sizes.iter().filter(|(begun, ..)| *begun <= cut);
        let begun: Vec<_> = begun.collect();
        let settled = |size: &&(u64, Option<u64>, u64)| size.1.is_some_and(|done| done <= cut);
        let last = begun.iter().rposition(settled).unwrap_or(0);
        begun[last..].iter().map(|(_, _, size)| *size).collect()
    }

    /// Continues the numbering of an earlier model, so that the data of both differs.
    pub fn later(self, than: &Model) -> Model {
        Model {
            after: than.after + than.actions.len() as Value,
            ..self
        }
    }

    /// Initial contents by sector.
    pub fn initial(&self) -> &[Value] {
        &self.initial
    }

    pub fn sectors(&self) -> u64 {
        self.initial.len() as u64
    }

    /// Returns all sectors that were ever changed, in order.
    pub fn touched(&self) -> Vec<u64> {
        let mut touched: Vec<u64> = self.history.keys().copied().collect();
        touched.sort_unstable();
        touched
    }

    /// Records the start of an action. Returns the action's number and, for a write, its value.
    pub fn begin(
        &mut self,
        kind: Kind,
        fua: bool,
        now: u64,
        first: u64,
        sectors: u64,
    ) -> (usize, Value) {
        let number = self.actions.len();
        self.actions.push(Action {
            kind,
            fua,
            submitted: now,
            done: None,
            failed: false,
        });
        for sector in first..first + sectors {
            self.history.entry(sector).or_default().push(number as u32);
        }
        (number, self.after + number as Value + 1)
    }

    pub fn end(&mut self, number: usize, now: u64, failed: bool) {
        let action = &mut self.actions[number];
        action.done = Some(now);
        action.failed = failed;
    }

    /// Records a flush: everything that had ended before `submitted` is durable from `done` on.
    pub fn flushed(&mut self, submitted: u64, done: u64) {
        self.flushes.push(Flush { submitted, done });
    }

    /// Returns the instant from which on an action is durable.
    fn durable(&self, action: &Action) -> u64 {
        let Some(done) = action.done else {
            return u64::MAX;
        };
        let flushes = self.flushes.iter().filter(|f| f.submitted > done);
        let flushed = flushes.map(|f| f.done).min().unwrap_or(u64::MAX);
        match action.fua {
            true => done,
            false => flushed,
        }
    }

    /// Returns what a read that was submitted at `since` and ends now may return.
    pub fn readable(&self, sector: u64, since: u64) -> Vec<Value> {
        let settled = |_, action: &Action| action.done.is_some_and(|done| done < since);
        self.allowed(sector, u64::MAX, settled)
    }

    /// Returns for each action whether it was durable at `cut`, for `after_cut`.
    pub fn durable_at(&self, cut: u64) -> Vec<bool> {
        let durable = |action| self.durable(action) <= cut;
        self.actions.iter().map(durable).collect()
    }

    /// Returns what a sector may contain after a power cut at `cut`.
    pub fn after_cut(&self, sector: u64, cut: u64, durable: &[bool]) -> Vec<Value> {
        self.allowed(sector, cut, |number, _| durable[number])
    }

    /// Returns the allowed contents of a sector. An action is irrelevant if a settled action began
    /// after it had ended. Discards and failed actions do not count as settled.
    fn allowed(
        &self,
        sector: u64,
        until: u64,
        settled: impl Fn(usize, &Action) -> bool,
    ) -> Vec<Value> {
        let initial = self.initial[sector as usize];
        let Some(history) = self.history.get(&sector) else {
            return vec![initial];
        };
        let actions = || {
            let all = history.iter().map(|n| (*n, &self.actions[*n as usize]));
            all.filter(|(_, action)| action.submitted <= until)
        };
        let rules =
            |action: &Action| matches!(action.kind, Kind::Write | Kind::Zero) && !action.failed;
        let ruling = actions().filter(|(n, a)| rules(a) && settled(*n as usize, a));
        let last = ruling.map(|(_, a)| a.submitted).max().unwrap_or(0);
        let mut allowed = Vec::new();
        if last == 0 {
            allowed.push(initial);
        }
        for (number, action) in actions() {
            if action.done.is_some_and(|done| done < last) {
                continue;
            }
            match action.kind {
                Kind::Write => allowed.push(self.after + number + 1),
                Kind::Zero => allowed.push(ZERO),
                Kind::Discard => allowed.push(ZERO),
                Kind::Cut => allowed.extend([ZERO, ANYTHING]),
            }
        }
        allowed
    }

    /// Describes the history of a sector, for people.
    pub fn story(&self, sector: u64) -> String {
        let history = self.history.get(&sector).into_iter().flatten();
        let told = history.map(|n| {
            let a = &self.actions[*n as usize];
            format!(
                "  {:#x}: {:?} fua={} submitted={} done={:?} durable={} failed={}\n",
                self.after + n + 1,
                a.kind,
                a.fua,
                a.submitted,
                a.done,
                self.durable(a),
                a.failed
            )
        });
        let initial = self.initial[sector as usize];
        let below = self.below[sector as usize];
        format!(
            "  initial {initial:#x}, below {below:#x}\n{}",
            told.collect::<String>()
        )
    }
}
