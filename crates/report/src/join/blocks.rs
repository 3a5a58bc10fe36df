//! The host's block layer below the image: the host requests that carry out a server's request.

use std::collections::{BTreeMap, HashMap};

use fathom_run::{Event, Extent, Kind, Run};
use smallvec::SmallVec;

use super::share::Share;
use super::survey::Survey;
use super::way::{Class, Key};
use super::window::Window;
use crate::analysis::HostClass;

/// A request of the host's block layer; its key is in bytes of the host's device.
#[derive(Debug)]
struct HostRq {
    key: Key,
    issue: i64,
    complete: Option<i64>,
    tid: u32,
    claimed: bool,
}

/// The work of the host's block layer for one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Below {
    pub(crate) class: HostClass,
    /// The first issue and the last completion.
    pub(crate) issue: Option<i64>,
    pub(crate) complete: Option<i64>,
    /// The thread that issued the first host request.
    pub(crate) issuer: Option<u32>,
    pub(crate) ambiguous: bool,
    /// A completion was not seen.
    pub(crate) incomplete: bool,
}

impl Below {
    fn nothing(class: HostClass) -> Below {
        Below {
            class,
            issue: None,
            complete: None,
            issuer: None,
            ambiguous: false,
            incomplete: false,
        }
    }
}

/// The host's requests to the image's device.
#[derive(Debug)]
pub(crate) struct Blocks {
    share: Share,
    traced: bool,
    /// The extents in order of their offset in the image.
    extents: Vec<Extent>,
    rqs: Window<HostRq>,
    starts: BTreeMap<u64, SmallVec<[u64; 1]>>,
    longest: u64,
    in_flight: HashMap<Key, SmallVec<[u64; 1]>>,
    /// The key, issue time and issuer of the request that the last event completed.
    completed: Option<(Key, i64, u32)>,
}

/// Ranges of the device in bytes, as (start, end).
type Ranges = SmallVec<[(u64, u64); 2]>;

impl Blocks {
    pub(crate) fn new(run: &Run, survey: &Survey) -> Blocks {
        let mut extents = run.disk().map_or(Vec::new(), |disk| disk.extents.clone());
        extents.sort_by_key(|extent| extent.offset);
        Blocks {
            share: Share::of(run),
            traced: survey.host(Kind::BlockRqIssue),
            extents,
            rqs: Window::default(),
            starts: BTreeMap::new(),
            longest: 0,
            in_flight: HashMap::new(),
            completed: None,
        }
    }

    /// Returns whether the image's host requests can be seen.
    pub(crate) fn is_watched(&self) -> bool {
        self.traced && self.share.is_known()
    }

    /// Returns whether the keys of the image's host requests are known in bytes of the image.
    pub(crate) fn is_placed(&self) -> bool {
        self.share.is_placed()
    }

    /// Returns the request that the last event completed: its key in the image, its issue time and
    /// its issuer.
    pub(crate) fn just_completed(&self) -> Option<(Key, i64, u32)> {
        self.completed
    }

    /// Processes an event. Returns false if the event completes a request of the image that was
    /// never issued.
    pub(crate) fn event(&mut self, at: i64, event: &Event) -> bool {
        let Some(key) = self.share.key(event) else {
            return true;
        };
        match event.kind {
            Kind::BlockRqIssue if self.share.holds(&key, event.tid) => {
                let id = self.rqs.push(HostRq {
                    key,
                    issue: at,
                    complete: None,
                    tid: event.tid,
                    claimed: false,
                });
                self.longest = self.longest.max(key.length);
                self.starts.entry(key.offset).or_default().push(id);
                self.in_flight.entry(key).or_default().push(id);
            }
            Kind::BlockRqComplete => {
                self.completed = None;
                let Some(ids) = self.in_flight.get_mut(&key) else {
                    return self.share.contains(&key) != Some(true);
                };
                let id = ids.remove(0);
                if ids.is_empty() {
                    self.in_flight.remove(&key);
                }
                if let Some(rq) = self.rqs.get_mut(id) {
                    rq.complete = Some(at);
                    self.completed = Some((self.share.image_key(rq.key), rq.issue, rq.tid));
                }
            }
            _ => {}
        }
        true
    }

    /// Returns the issue times of requests that have not completed and were not followed.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = i64> + '_ {
        let rqs = self.in_flight.values().flatten();
        let rqs = rqs.filter_map(|&id| self.rqs.get(id));
        rqs.filter(|rq| !rq.claimed).map(|rq| rq.issue)
    }

    /// Returns the ranges of the device that hold the image's bytes; holes have none.
    fn ranges(&self, key: &Key) -> Ranges {
        let mut ranges = Ranges::new();
        let from = self
            .extents
            .partition_point(|e| e.offset.saturating_add(e.length) <= key.offset);
        for extent in &self.extents[from..] {
            if extent.offset >= key.end() {
                break;
            }
            let start = key.offset.max(extent.offset);
            let end = key.end().min(extent.offset.saturating_add(extent.length));
            let place = extent.physical.saturating_add(start - extent.offset);
            let range = (place, place.saturating_add(end - start));
            match ranges.last_mut() {
                Some(last) if last.1 == range.0 => last.1 = range.1,
                _ => ranges.push(range),
            }
        }
        ranges
    }

    /// Returns what the host did for a request between `from` and `to`.
    pub(crate) fn below(&mut self, key: &Key, from: i64, to: i64) -> Below {
        if !self.is_watched() {
            return Below::nothing(HostClass::Unknown);
        }
        if self.extents.is_empty() || key.class == Class::Flush {
            return self.by_order(key, from, to);
        }
        let ranges = self.ranges(key);
        let (mut ids, ambiguous) = self.overlapping(key.class, &ranges, from, to);
        if ids.is_empty() {
            return Below {
                incomplete: self.outlives(key.class, &ranges, from, to),
                ..Below::nothing(HostClass::Cached)
            };
        }
        ids.sort_unstable();
        let (mut outside, mut done) = (false, 0);
        for &id in &ids {
            if let Some(rq) = self.rqs.get_mut(id) {
                rq.claimed = true;
                let (start, end) = (rq.key.offset, rq.key.end());
                outside |= !ranges.iter().any(|&(a, b)| a <= start && end <= b);
                let common = |&(a, b): &(u64, u64)| end.min(b).saturating_sub(start.max(a));
                done += ranges.iter().map(common).sum::<u64>();
            }
        }
        let wanted: u64 = ranges.iter().map(|(a, b)| b - a).sum();
        let class = match (ids.len(), outside) {
            (1, false) => HostClass::Direct,
            (_, true) => HostClass::Merged,
            _ => HostClass::Split,
        };
        let mut below = self.summed(&ids, class, ambiguous);
        // The page cache may have served a part of the request, but a missing event is likelier.
        below.incomplete |= done < wanted;
        below
    }

    fn summed(&self, ids: &[u64], class: HostClass, ambiguous: bool) -> Below {
        let rqs = || ids.iter().filter_map(|&id| self.rqs.get(id));
        let complete: Option<Vec<i64>> = rqs().map(|rq| rq.complete).collect();
        let first = rqs().min_by_key(|rq| rq.issue);
        Below {
            class,
            issue: first.map(|rq| rq.issue),
            issuer: first.map(|rq| rq.tid),
            incomplete: complete.is_none(),
            complete: complete.and_then(|all| all.into_iter().max()),
            ambiguous,
        }
    }

    /// Returns the host's requests that touch `ranges` within `from..=to`, and whether the choice
    /// is ambiguous. If several requests have the same bytes, the first unclaimed one is returned.
    fn overlapping(
        &self,
        class: Class,
        ranges: &Ranges,
        from: i64,
        to: i64,
    ) -> (SmallVec<[u64; 4]>, bool) {
        let mut found: SmallVec<[(bool, u64, u64, u64); 4]> = SmallVec::new();
        for &(start, end) in ranges {
            let first = start.saturating_sub(self.longest);
            for &id in self.starts.range(first..end).flat_map(|(_, ids)| ids) {
                let Some(rq) = self.rqs.get(id) else { continue };
                let (a, b) = (rq.key.offset, rq.key.end());
                let in_time = rq.issue >= from
                    && rq.issue <= to
                    && rq.complete.is_none_or(|complete| complete <= to);
                if rq.key.class == class && b > start && in_time {
                    let merged = a < start || b > end;
                    found.push((rq.claimed && !merged, id, a, b));
                }
            }
        }
        found.sort_unstable();
        found.dedup();
        let mut taken: SmallVec<[(u64, u64); 4]> = SmallVec::new();
        let mut ids = SmallVec::new();
        let mut ambiguous = false;
        for &(_, id, a, b) in &found {
            if taken.iter().any(|&(c, d)| a < d && c < b) {
                ambiguous = true;
                continue;
            }
            taken.push((a, b));
            ids.push(id);
        }
        (ids, ambiguous)
    }

    /// Returns whether a host request was issued within `from..=to` but completed after `to`.
    fn outlives(&self, class: Class, ranges: &Ranges, from: i64, to: i64) -> bool {
        ranges.iter().any(|&(start, end)| {
            let first = start.saturating_sub(self.longest);
            let near = self.starts.range(first..end).flat_map(|(_, ids)| ids);
            near.filter_map(|&id| self.rqs.get(id)).any(|rq| {
                rq.key.class == class
                    && rq.key.end() > start
                    && (from..=to).contains(&rq.issue)
                    && !rq.claimed
            })
        })
    }

    /// Identifies the host request by its length and order, where its place on the device does not.
    fn by_order(&mut self, key: &Key, from: i64, to: i64) -> Below {
        let fits = |rq: &HostRq| {
            rq.key.class == key.class
                && rq.key.length == key.length
                && rq.issue >= from
                && rq.complete.is_some_and(|complete| complete <= to)
        };
        let fitting = self.rqs.iter().filter(|(_, rq)| fits(rq));
        // A host request that another request has claimed may still be this one's.
        let (mut count, mut first) = (0, None);
        for (id, rq) in fitting {
            count += 1;
            first = first.or((!rq.claimed).then_some(id));
        }
        let Some(id) = first else {
            // A file system may complete a flush without the device; a read could not be located.
            return Below::nothing(HostClass::Unknown);
        };
        if let Some(rq) = self.rqs.get_mut(id) {
            rq.claimed = true;
        }
        self.summed(&[id], HostClass::Direct, count > 1)
    }

    /// Drops requests that were issued before `at`.
    pub(crate) fn prune(&mut self, at: i64) {
        while let Some((id, rq)) = self.rqs.oldest()
            && rq.issue < at
        {
            let key = rq.key;
            self.rqs.remove(id);
            if let Some(ids) = self.starts.get_mut(&key.offset) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.starts.remove(&key.offset);
                }
            }
            if let Some(ids) = self.in_flight.get_mut(&key) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.in_flight.remove(&key);
                }
            }
        }
    }
}
