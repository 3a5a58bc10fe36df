//! Adds up joined requests one by one, in bounded memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use super::way::Way;
use crate::analysis::{Delivery, Exact, HeatMap, HostClass, Joined, Layer, LayerRow, Truth};
use crate::distribution::Tally;

/// log2 of the number of slices into which each power of two of the total is divided.
const SLICE_BITS: u32 = 7;
/// log2 of the number of the heat map's rows to a power of two, then its maximum of columns.
const HEAT_BITS: u32 = 2;
const HEAT_COLUMNS: usize = 240;
const LAYERS: usize = Layer::ALL.len();

/// Sums of the layers of requests whose totals are nearly equal.
#[derive(Clone, Debug)]
struct Slice {
    count: u64,
    layers: [i64; LAYERS],
}

impl Default for Slice {
    fn default() -> Slice {
        Slice {
            count: 0,
            layers: [0; LAYERS],
        }
    }
}

/// A request among the slowest: (total in ns, number, request), ordered by total, then number.
#[derive(Debug)]
struct Slow(i64, u64, Box<Joined>);

impl PartialEq for Slow {
    fn eq(&self, other: &Slow) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Slow {}

impl PartialOrd for Slow {
    fn partial_cmp(&self, other: &Slow) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Slow {
    fn cmp(&self, other: &Slow) -> std::cmp::Ordering {
        (self.0, Reverse(self.1)).cmp(&(other.0, Reverse(other.1)))
    }
}

/// Adds up joined requests.
#[derive(Debug)]
pub(crate) struct Sums {
    total: Tally,
    layers: Vec<Tally>,
    negative: [u64; LAYERS],
    passed: [bool; LAYERS],
    slices: BTreeMap<u32, Slice>,
    slowest: BinaryHeap<Reverse<Slow>>,
    keep: usize,
    heat: Heat,
    pub(crate) truth: Truth,
    hosts: HashMap<HostClass, u64>,
}

impl Sums {
    /// Creates sums without requests; they will keep the `keep` slowest requests.
    pub(crate) fn new(keep: usize) -> Sums {
        Sums {
            total: Tally::new(),
            layers: vec![Tally::new(); LAYERS],
            negative: [0; LAYERS],
            passed: [false; LAYERS],
            slices: BTreeMap::new(),
            slowest: BinaryHeap::new(),
            keep,
            heat: Heat::default(),
            truth: Truth::default(),
            hosts: HashMap::new(),
        }
    }

    /// Adds a request.
    pub(crate) fn add(&mut self, way: &Way) {
        let mut layers = [0i64; LAYERS];
        let mut passes = [false; LAYERS];
        for (layer, time) in way.layers() {
            layers[layer as usize] += time;
            passes[layer as usize] = true;
        }
        let (start, total) = way.extent();
        self.total.add(total);
        for (i, &time) in layers.iter().enumerate() {
            if passes[i] {
                self.layers[i].add(time);
                self.passed[i] = true;
                self.negative[i] += u64::from(time < 0);
            }
        }
        let slice = self.slices.entry(slice_of(total, SLICE_BITS)).or_default();
        slice.count += 1;
        for (sum, time) in slice.layers.iter_mut().zip(layers) {
            *sum += time;
        }
        self.heat.add(start, total);
        self.note_slow(way, total);
        self.note_truth(way);
    }

    fn note_slow(&mut self, way: &Way, total: i64) {
        let slow_enough = match self.slowest.peek() {
            Some(Reverse(least)) if self.slowest.len() >= self.keep => total > least.0,
            _ => self.keep > 0,
        };
        if slow_enough {
            let slow = Slow(total, way.number, Box::new(way.joined()));
            self.slowest.push(Reverse(slow));
            if self.slowest.len() > self.keep {
                self.slowest.pop();
            }
        }
    }

    fn note_truth(&mut self, way: &Way) {
        let truth = &mut self.truth;
        truth.joined += 1;
        truth.ambiguous += u64::from(way.ambiguous);
        truth.incomplete += u64::from(way.incomplete);
        truth.violations += u64::from(way.violations);
        match way.delivery {
            Delivery::Kicked => truth.kicked += 1,
            Delivery::Batched => truth.batched += 1,
            Delivery::Polled => truth.polled += 1,
            Delivery::Unknown => {}
        }
        *self.hosts.entry(way.host).or_default() += 1;
    }

    /// Returns the breakdown of all added requests.
    pub(crate) fn finish(mut self) -> Exact {
        let count = self.total.count();
        let tail = self.band(0, count / 100);
        let tenth = count / 10;
        let middle = self.band((count - tenth) / 2, tenth);
        let mean = self.total.mean();
        let tail_total: f64 = tail.iter().flatten().sum();
        let mut rows = Vec::new();
        for (i, &layer) in Layer::ALL.iter().enumerate() {
            if !self.passed[i] {
                continue;
            }
            // A request that does not pass a layer spends no time there.
            let time = &mut self.layers[i];
            time.add_n(0, count - time.count());
            let (name, group) = layer.describe();
            let share = |part: f64, whole: f64| if whole == 0.0 { 0.0 } else { part / whole };
            let tail_mean = tail.as_ref().map(|means| means[i]);
            rows.push(LayerRow {
                layer,
                group,
                name,
                share: share(time.mean(), mean),
                middle_mean: middle.as_ref().map(|means| means[i]),
                tail_mean,
                tail_share: tail_mean.map(|mean| share(mean, tail_total)),
                negative: self.negative[i],
                time: time.finish(),
            });
        }
        let mut hosts: Vec<(HostClass, u64)> = self.hosts.into_iter().collect();
        hosts.sort_by_key(|&(class, _)| class as u8);
        let mut slowest: Vec<Slow> = self.slowest.into_iter().map(|Reverse(slow)| slow).collect();
        slowest.sort_by(|a, b| b.cmp(a));
        Exact {
            total: self.total.finish(),
            layers: rows,
            truth: Truth {
                hosts,
                ..self.truth
            },
            slowest: slowest.into_iter().map(|slow| *slow.2).collect(),
            heat: self.heat.finish(),
        }
    }

    /// Returns each layer's mean over the `wanted` slowest requests after the `slower` slowest
    /// ones. Returns None if `wanted` is below ten. A slice at an edge, whose totals differ by less
    /// than 1%, counts in proportion.
    fn band(&self, slower: u64, wanted: u64) -> Option<[f64; LAYERS]> {
        if wanted < 10 {
            return None;
        }
        let mut sums = [0.0; LAYERS];
        let (mut passed_by, mut left) = (slower, wanted);
        for slice in self.slices.values().rev() {
            let passed = passed_by.min(slice.count);
            passed_by -= passed;
            let taken = left.min(slice.count - passed);
            let share = taken as f64 / slice.count as f64;
            for (sum, &time) in sums.iter_mut().zip(&slice.layers) {
                *sum += time as f64 * share;
            }
            left -= taken;
            if left == 0 {
                break;
            }
        }
        Some(sums.map(|sum| sum / wanted as f64))
    }
}

/// Returns the step of a logarithmic scale: each power of two has `2^bits` steps. Negative
/// values are in the first step.
fn slice_of(value: i64, bits: u32) -> u32 {
    let Ok(value) = u64::try_from(value) else {
        return 0;
    };
    if value < 1 << bits {
        return value as u32;
    }
    let shift = 63 - value.leading_zeros() - bits;
    (shift << bits) + (value >> shift) as u32
}

/// Returns the least value of a step of [`slice_of`].
fn slice_start(slice: u32, bits: u32) -> i64 {
    if slice < 2 << bits {
        return i64::from(slice);
    }
    let shift = (slice >> bits) - 1;
    i64::from((slice & ((1 << bits) - 1)) | 1 << bits) << shift
}

/// The heat map while it grows; when it has too many columns, their width doubles.
#[derive(Debug)]
struct Heat {
    origin: Option<i64>,
    column: i64,
    cells: HashMap<(i64, u32), u64>,
}

impl Default for Heat {
    fn default() -> Heat {
        Heat {
            origin: None,
            column: 1_000_000,
            cells: HashMap::new(),
        }
    }
}

impl Heat {
    fn add(&mut self, start: i64, latency: i64) {
        let origin = *self.origin.get_or_insert(start);
        while ((start - origin) / self.column).unsigned_abs() >= HEAT_COLUMNS as u64 / 2 {
            self.widen();
        }
        let cell = (
            (start - origin).div_euclid(self.column),
            slice_of(latency, HEAT_BITS),
        );
        *self.cells.entry(cell).or_default() += 1;
    }

    fn widen(&mut self) {
        self.column *= 2;
        let mut wider: HashMap<(i64, u32), u64> = HashMap::new();
        for ((column, row), count) in self.cells.drain() {
            *wider.entry((column.div_euclid(2), row)).or_default() += count;
        }
        self.cells = wider;
    }

    fn finish(self) -> HeatMap {
        let columns = || self.cells.keys().map(|&(column, _)| column);
        let rows = || self.cells.keys().map(|&(_, row)| row);
        let (Some(first), Some(last)) = (columns().min(), columns().max()) else {
            return HeatMap::default();
        };
        let low = rows().min().unwrap_or(0);
        let high = rows().max().unwrap_or(0);
        let mut cells: Vec<(u32, u32, u64)> = self
            .cells
            .iter()
            .map(|(&(column, row), &count)| ((column - first) as u32, row - low, count))
            .collect();
        cells.sort_unstable();
        HeatMap {
            start: (0..=last - first).map(|i| i * self.column).collect(),
            column_ns: self.column,
            latency: (low..=high)
                .map(|row| slice_start(row, HEAT_BITS))
                .collect(),
            cells,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Point;
    use crate::join::way::Key;

    fn way(number: u64, start: i64, submit: i64, rest: i64) -> Way {
        let mut way = Way::new(Key::new(0, number * 4096, 4096));
        way.number = number;
        way.points.set(Point::Call, start);
        way.points.set(Point::Issue, start + submit);
        way.points.set(Point::Kick, start + submit + rest);
        way
    }

    #[test]
    fn steps_cover_every_value_once() {
        for bits in [HEAT_BITS, SLICE_BITS] {
            let mut last = 0;
            for value in 0..100_000i64 {
                let slice = slice_of(value, bits);
                assert!(slice == last || slice == last + 1, "{value}");
                if slice != last {
                    assert_eq!(slice_start(slice, bits), value);
                }
                last = slice;
            }
        }
    }

    #[test]
    fn the_middle_is_what_ordinary_requests_spend() {
        let mut sums = Sums::new(0);
        for i in 0..2000i64 {
            // The two halves differ in their time in the ring; the median band has some of both.
            let rest = if i % 2 == 0 { 100 } else { 50_000 };
            sums.add(&way(i as u64, i * 1_000_000, 1000 + i % 2, rest));
        }
        let rows = sums.finish().layers;
        let middle = |layer| {
            let row = rows.iter().find(|row| row.layer == layer).unwrap();
            row.middle_mean.unwrap()
        };
        assert!((middle(Layer::GuestSubmit) - 1000.5).abs() < 1e-6);
        assert!((middle(Layer::GuestBatch) - 25_050.0).abs() < 1e-6);
        let mut few = Sums::new(0);
        (0..99).for_each(|i| few.add(&way(i, i as i64, 1, 1)));
        assert_eq!(few.finish().layers[0].middle_mean, None);
    }

    #[test]
    fn the_tail_is_the_slowest_hundredth() {
        let mut sums = Sums::new(3);
        for i in 0..2000 {
            // The 20 slowest requests spend their time in the ring, the others before it.
            let slow = i % 100 == 99;
            sums.add(&way(
                i,
                i as i64 * 1_000_000,
                1000,
                if slow { 50_000 } else { 10 },
            ));
        }
        let exact = sums.finish();
        let row = |layer| exact.layers.iter().find(|row| row.layer == layer).unwrap();
        assert_eq!(row(Layer::GuestBatch).tail_mean, Some(50_000.0));
        assert_eq!(row(Layer::GuestSubmit).tail_mean, Some(1000.0));
        assert_eq!(row(Layer::GuestSubmit).time.p50, Some(1000));
        let numbers: Vec<u64> = exact.slowest.iter().map(|joined| joined.number).collect();
        assert_eq!(numbers, [99, 199, 299]);
        let cells: u64 = exact.heat.cells.iter().map(|cell| cell.2).sum();
        assert_eq!(cells, 2000);
        assert!(exact.heat.start.len() <= HEAT_COLUMNS);
        let shares: f64 = exact.layers.iter().map(|row| row.share).sum();
        assert!((shares - 1.0).abs() < 1e-9);
    }
}
