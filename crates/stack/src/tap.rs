//! A layer below the filters that marks changes, and can delay writes.

use crate::bitmaps::{Bitmaps, Left, Marked, data_of};
use crate::brake::Brake;
use crate::past::Past;
use fathom_core::{
    Channel, ChannelLayer, Cx, Disk, DiskError, DiskLayer, EventNotifier, Op, Owner, Request,
    RequestId, Resize, Token, WorkerHandle,
};
use fathom_storage::FileDisk;
use fathom_units::cause;
use parking_lot::Mutex;
use std::fs::Metadata;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time without any progress after which saving original data is given up.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum time that a write waits for its original data to be saved, despite progress.
const LONGEST: Duration = Duration::from_secs(20);
/// Time without any progress of a mirror after which its throttling is given up.
const BRAKED: Duration = Duration::from_secs(10);
/// Maximum time that a write of a draining source waits, since others wait for the source.
const LEAVING: Duration = Duration::from_secs(1);
/// Interval between checks of these timeouts.
const LOOK: Duration = Duration::from_millis(500);

/// Marks changes in the disk's bitmaps, and delays writes for a backup or a mirror.
///
/// A write waits while its original data is being saved, or while the mirror is behind. Reads
/// pass at once.
pub struct Tap {
    below: Arc<dyn Disk>,
    file: Option<Arc<FileDisk>>,
    /// The external data file, if any; writes may change it and not the image file.
    data: Option<Arc<FileDisk>>,
    bitmaps: Arc<Bitmaps>,
    wanted: Arc<Mutex<Wanted>>,
    /// Number of activations.
    taken: AtomicU64,
}

/// The operations for which writes wait.
#[derive(Clone, Default)]
struct Wanted {
    /// Saves original data before it is overwritten.
    past: Option<Arc<Past>>,
    /// Throttles writes for a mirror.
    brake: Option<Arc<Brake>>,
}

/// Returns whether both are the same value, or both are `None`.
fn is_same<T>(one: Option<&Arc<T>>, other: Option<&Arc<T>>) -> bool {
    one.map(Arc::as_ptr) == other.map(Arc::as_ptr)
}

impl Tap {
    /// Creates the tap. `file`: the image's file, if any; `data`: the external data file, if any.
    pub(crate) fn new(
        below: Arc<dyn Disk>,
        file: Option<Arc<FileDisk>>,
        data: Option<Arc<FileDisk>>,
        bitmaps: Bitmaps,
    ) -> Tap {
        Tap {
            below,
            file,
            data,
            taken: AtomicU64::new(0),
            bitmaps: Arc::new(bitmaps),
            wanted: Arc::default(),
        }
    }

    /// Adds a bitmap, in which every change is marked that is not complete when this returns.
    ///
    /// Waits for the workers.
    pub fn add_bitmap(
        &self,
        name: &str,
        size: u64,
        granularity: Option<u64>,
        workers: &[WorkerHandle],
    ) -> Result<(), String> {
        let mut mark_in_flight = || hear(workers);
        self.bitmaps
            .add(name, size, granularity, &mut mark_in_flight)
    }

    /// Clears a bitmap, in which every change is marked that is not complete when this returns.
    ///
    /// Waits for the workers.
    pub fn clear_bitmap(
        &self,
        name: &str,
        size: u64,
        workers: &[WorkerHandle],
    ) -> Result<(), String> {
        self.bitmaps.clear(name, size, &mut || hear(workers))
    }

    /// Returns the disk below the tap, for reading.
    pub fn below(&self) -> &Arc<dyn Disk> {
        &self.below
    }

    /// Returns the bitmaps in which changes are marked.
    pub fn bitmaps(&self) -> &Arc<Bitmaps> {
        &self.bitmaps
    }

    /// Holds all writes and drains earlier ones.
    ///
    /// After this function has returned, a reader sees the disk as it is to be preserved. Later
    /// writes wait until their original data is saved, which begins with [`Past::begin`].
    ///
    /// # Errors
    /// A message for the user; nothing is held then.
    pub fn hold(&self, past: &Arc<Past>, workers: &[WorkerHandle]) -> Result<(), String> {
        {
            let mut wanted = self.wanted.lock();
            if wanted.past.is_some() {
                return Err("another backup or mirror already follows the disk".into());
            }
            wanted.past = Some(past.clone());
        }
        let begun = hear(workers).and_then(|()| settle(workers));
        begun.inspect(|()| past.hold()).inspect_err(|_| {
            past.end();
            self.forget(workers);
        })
    }

    /// Ends copy-before-write for a past that is over, so that no write waits.
    pub fn forget(&self, workers: &[WorkerHandle]) {
        self.wanted.lock().past = None;
        // A stuck worker notices when it responds again.
        let _ = hear(workers);
    }

    /// Throttles writes by `brake` from now on. The error is a message for the user.
    pub fn hold_back(&self, brake: &Arc<Brake>, workers: &[WorkerHandle]) -> Result<(), String> {
        {
            let mut wanted = self.wanted.lock();
            if wanted.brake.is_some() {
                return Err("another operation already holds the disk's requests".into());
            }
            wanted.brake = Some(brake.clone());
        }
        hear(workers).inspect_err(|_| {
            brake.release();
            self.hold_back_no_more(workers);
        })
    }

    /// Ends throttling.
    pub fn hold_back_no_more(&self, workers: &[WorkerHandle]) {
        self.wanted.lock().brake = None;
        // A stuck worker notices when it responds again.
        let _ = hear(workers);
    }

    /// Returns how often others may have changed the image between deactivation and activation.
    ///
    /// Each activation counts if changes cannot be detected: for devices, for images that are not
    /// in a file, and for images with an external data file.
    pub fn changes_by_others(&self) -> u64 {
        match self.telling() {
            Some(file) => file.changes_by_others(),
            None => self.taken.load(Ordering::SeqCst),
        }
    }

    /// Returns the file whose attributes show whether the image was changed.
    fn telling(&self) -> Option<&Arc<FileDisk>> {
        self.file.as_ref().filter(|_| self.data.is_none())
    }
}

/// Returns the state of an image's file, and of its data file, for the bitmaps.
fn as_left(image: Option<Metadata>, data: Option<Option<Metadata>>) -> Option<Left> {
    let image = image.filter(Metadata::is_file)?;
    Some(Left::of(
        &image,
        data.map_or(0, |data| data_of(data.as_ref())),
    ))
}

fn hear(workers: &[WorkerHandle]) -> Result<(), String> {
    let looks: Vec<_> = workers.iter().map(WorkerHandle::begin_look).collect();
    let unheard = looks.into_iter().filter_map(|look| look.wait().err());
    match unheard.count() {
        0 => Ok(()),
        _ => Err("a worker does not respond".into()),
    }
}

fn settle(workers: &[WorkerHandle]) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let settling: Vec<_> = workers.iter().map(WorkerHandle::begin_settle).collect();
    match settling.into_iter().all(|settling| settling.wait(deadline)) {
        true => Ok(()),
        false => Err("requests in flight do not end".into()),
    }
}

impl DiskLayer for Tap {
    fn below(&self) -> &dyn Disk {
        &*self.below
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.below.activate()?;
        self.taken.fetch_add(1, Ordering::SeqCst);
        let image = self.file.as_ref().and_then(|file| file.when_taken());
        let image = as_left(image, self.data.as_ref().map(|data| data.when_taken()));
        let opened = self.bitmaps.open(self.below.info().size, image);
        opened.map_err(|problem| {
            if let Err(error) = self.below.deactivate() {
                tracing::error!("{error}");
            }
            DiskError::Refused(problem)
        })
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        let how_left = || {
            let left = self.file.as_ref().and_then(|file| file.when_left());
            as_left(left, self.data.as_ref().map(|data| data.when_left()))
        };
        self.bitmaps.close(|| self.below.deactivate(), how_left)
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let before = self.below.info().size;
        // Data that is cut off does not come back if the disk grows again.
        let after = to.size.unwrap_or(before);
        if after < before {
            self.bitmaps.mark_from(after);
        }
        let resized = self.below.resize(to);
        // After an error, too, the disk may have another size.
        let after = self.below.info().size;
        if after < before {
            self.bitmaps.mark_from(after);
        }
        self.bitmaps.resized(after);
        resized
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let channel = self.below.channel(cx)?;
        let mut channel = TapChannel {
            channel,
            below: cx.newest_owner(),
            bitmaps: self.bitmaps.clone(),
            epoch: 0,
            marked: Arc::new([]),
            wanted: self.wanted.clone(),
            goes_by: Wanted::default(),
            is_idle: true,
            notifier: None,
            tag: cx.new_tag(),
            waiting: Vec::new(),
            seen: (0, 0),
        };
        channel.look(cx);
        Ok(Box::new(channel))
    }
}

/// Returns whether an operation changes the disk's data.
fn changes(op: Op) -> bool {
    matches!(op, Op::Write | Op::Discard | Op::WriteZeroes)
}

struct TapChannel {
    channel: Box<dyn Channel>,
    /// The last owner of child requests below; their offsets are not the disk's.
    below: Owner,
    bitmaps: Arc<Bitmaps>,
    /// The epoch of the bitmaps that this worker marks, and those bitmaps.
    epoch: u64,
    marked: Marked,
    wanted: Arc<Mutex<Wanted>>,
    /// The value of `wanted` that this worker has seen last.
    goes_by: Wanted,
    /// Whether no change must be marked, and no write must wait.
    is_idle: bool,
    /// Eventfd for progress of the past and the brake, which share it because the engine could not
    /// tell several apart.
    notifier: Option<Arc<EventNotifier>>,
    /// Tag of wake-ups by the notifier.
    tag: u16,
    /// Waiting writes, each with its start of waiting in ticks, the oldest first.
    waiting: Vec<(RequestId, u64)>,
    /// The last progress that was seen, and its time in ticks.
    seen: (u64, u64),
}

impl TapChannel {
    /// Takes over the current bitmaps and operations.
    fn look(&mut self, cx: &mut Cx) {
        self.look_at_wanted(cx);
        self.look_at_bitmaps(cx);
    }

    /// Takes over the current bitmaps if they have changed.
    ///
    /// Requests in flight may change the disk later, and were marked in the former bitmaps only.
    /// Therefore they are marked in all current ones.
    fn look_at_bitmaps(&mut self, cx: &Cx) {
        if self.epoch != self.bitmaps.epoch() {
            (self.epoch, self.marked) = self.bitmaps.marked();
            self.mark_in_flight(cx);
        }
        let Wanted { past, brake } = &self.goes_by;
        self.is_idle = self.marked.is_empty() && past.is_none() && brake.is_none();
    }

    #[cold]
    fn mark_in_flight(&self, cx: &Cx) {
        if self.marked.is_empty() {
            return;
        }
        cx.for_each_in_flight(|request| {
            if request.owner == Owner::SOURCE || request.owner > self.below {
                self.mark(request);
            }
        });
    }

    /// Marks the range that a request may change.
    fn mark(&self, request: &Request) {
        if changes(request.op) {
            let (offset, len) = (request.offset, request.len);
            self.marked
                .iter()
                .for_each(|bitmap| bitmap.mark(offset, len));
        }
    }

    /// Marks the range that a request may change. Returns true if it waits or has completed.
    fn mark_or_wait(&mut self, cx: &mut Cx, id: RequestId) -> bool {
        if self.epoch != self.bitmaps.epoch() {
            self.look_at_bitmaps(cx);
        }
        let request = &cx.slab[id];
        if !changes(request.op) {
            return false;
        }
        self.mark(request);
        if self.is_let(cx, id) {
            return false;
        }
        self.wait(cx, id);
        true
    }

    /// Returns whether the request may pass.
    fn is_let(&self, cx: &Cx, id: RequestId) -> bool {
        let (Wanted { past, brake }, request) = (&self.goes_by, &cx.slab[id]);
        let (op, offset, len) = (request.op, request.offset, request.len);
        // The brake counts what it lets pass, so it comes last. A source that drains is not
        // throttled, since others wait for it.
        past.as_ref().is_none_or(|past| past.lets(op, offset, len))
            && brake
                .as_ref()
                .is_none_or(|brake| brake.lets(op, len) || !cx.may_wait(id))
    }

    fn look_at_wanted(&mut self, cx: &mut Cx) {
        let wanted = self.wanted.lock().clone();
        let has_past = is_same(wanted.past.as_ref(), self.goes_by.past.as_ref());
        let has_brake = is_same(wanted.brake.as_ref(), self.goes_by.brake.as_ref());
        if has_past && has_brake {
            return;
        }
        self.goes_by = wanted;
        if let Err(problem) = self.listen(cx, has_past, has_brake) {
            self.give_up(&problem);
        }
        // These requests have waited for the former operations.
        for (id, _) in std::mem::take(&mut self.waiting) {
            ChannelLayer::submit(self, cx, id);
        }
    }

    fn listen(&mut self, cx: &mut Cx, has_past: bool, has_brake: bool) -> Result<(), String> {
        let notifier = self.notifier(cx);
        let notifier =
            notifier.map_err(|error| format!("a worker cannot wait: {}", cause(error)))?;
        let Wanted { past, brake } = &self.goes_by;
        { past.iter().filter(|_| !has_past) }.for_each(|past| past.listen(&notifier));
        { brake.iter().filter(|_| !has_brake) }.for_each(|brake| brake.listen(&notifier));
        Ok(())
    }

    /// Gives up the operations, so that no write waits any more.
    fn give_up(&self, problem: &str) {
        let Wanted { past, brake } = &self.goes_by;
        past.iter().for_each(|past| past.give_up(problem.into()));
        brake.iter().for_each(|brake| brake.give_up(problem.into()));
    }

    /// Returns a number that changes with each progress of the operations.
    fn progress(&self) -> u64 {
        let Wanted { past, brake } = &self.goes_by;
        let past = past.as_ref().map_or(0, |past| past.progress());
        past.wrapping_add(brake.as_ref().map_or(0, |brake| brake.progress()))
    }

    fn notifier(&mut self, cx: &mut Cx) -> io::Result<Arc<EventNotifier>> {
        if let Some(notifier) = &self.notifier {
            return Ok(notifier.clone());
        }
        let notifier = EventNotifier::new()?;
        let token = Token::channel(self.tag);
        cx.engine.watch(notifier.as_raw_fd(), token)?;
        Ok(self.notifier.insert(Arc::new(notifier)).clone())
    }

    #[cold]
    fn wait(&mut self, cx: &mut Cx, id: RequestId) {
        let Some(notifier) = &self.notifier else {
            return self.channel.submit(cx, id);
        };
        let request = &cx.slab[id];
        if let Some(past) = &self.goes_by.past {
            if request.op == Op::Discard {
                // Discarding is optional. The data is retained instead of being saved first.
                cx.enter(id, fathom_core::Stage::Device);
                return cx.complete(id, 0);
            }
            past.want(request.offset, request.len);
        }
        // The data may have been saved meanwhile.
        notifier.notify();
        if self.waiting.is_empty() {
            self.seen = (self.progress(), cx.now());
        }
        self.waiting.push((id, cx.now()));
        self.look_later(cx);
    }

    fn look_later(&self, cx: &mut Cx) {
        let later = cx.now() + cx.clock().ticks(LOOK);
        cx.wake_at(later);
    }

    /// Submits the waiting writes that may pass now.
    fn go_on(&mut self, cx: &mut Cx) {
        if self.waiting.is_empty() {
            return;
        }
        for (id, since) in std::mem::take(&mut self.waiting) {
            match self.is_let(cx, id) {
                true => self.channel.submit(cx, id),
                false => self.waiting.push((id, since)),
            }
        }
    }

    /// Gives up the operations if they make no progress, or if a write waits for too long.
    fn lose_patience(&mut self, cx: &mut Cx) {
        if self.waiting.is_empty() {
            return;
        }
        let (progress, now) = (self.progress(), cx.now());
        if progress != self.seen.0 {
            self.seen = (progress, now);
        }
        let clock = cx.clock();
        let for_longer = |since: u64, than| clock.duration(now.saturating_sub(since)) >= than;
        // A throttled write also waits for writes of other clients.
        let is_kept = self.goes_by.past.is_some();
        let patience = if is_kept { PATIENCE } else { BRAKED };
        let is_enough = |(id, since): &(RequestId, u64)| match cx.may_wait(*id) {
            true => is_kept && for_longer(*since, LONGEST),
            false => for_longer(*since, LEAVING),
        };
        if for_longer(self.seen.1, patience) || self.waiting.iter().any(is_enough) {
            self.give_up("the data to be overwritten could not be saved or followed in time");
            return self.go_on(cx);
        }
        self.look_later(cx);
    }
}

impl ChannelLayer for TapChannel {
    #[inline]
    fn below(&mut self) -> &mut dyn Channel {
        &mut *self.channel
    }

    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        let is_idle = self.is_idle && self.epoch == self.bitmaps.epoch();
        if !is_idle && self.mark_or_wait(cx, id) {
            return;
        }
        self.channel.submit(cx, id);
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        if id == RequestId::NOBODY && tag == self.tag {
            return self.go_on(cx);
        }
        self.channel.complete(cx, id, tag, result);
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.look(cx);
        self.channel.timer(cx);
        self.go_on(cx);
        self.lose_patience(cx);
    }

    /// Waiting requests need I/O that is in progress, and do not wait long.
    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.channel.drain(cx, source);
        self.go_on(cx);
        self.lose_patience(cx);
    }
}
