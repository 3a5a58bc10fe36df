//! State shared by all users of one base image in this process.

use super::stripe_notifier::{StripeNotifier, overlap};
use super::terms::Terms;
use super::touched::Touched;
use super::view::View;
use super::wire::{self, Geometry, Run, ToKeeper};
use crate::file::FileOptions;
use parking_lot::Mutex;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    pub(super) terms: Terms,
    /// The disk's name as users write it.
    pub(super) name: PathBuf,
    /// Options for reading the cache's data file.
    pub(super) files: FileOptions,
    /// Time for which requests wait for data that does not arrive.
    pub(super) patience: Duration,
    pub(super) geometry: Geometry,
    pub(super) touched: Touched,
    /// Number of the present view; incremented with each new view.
    epoch: AtomicU64,
    /// Whether the remote delivers no data, or there is no keeper.
    is_away: AtomicBool,
    now: Mutex<Now>,
    /// Notifies the link's thread that the last user of the image has gone.
    pub(super) end: StripeNotifier,
    has_ended: AtomicBool,
    /// Time when the keeper last sent a message, or a connection began, in milliseconds after
    /// `beginning`.
    heard: AtomicU64,
    /// Number of the present connection; incremented with each new connection.
    connection: AtomicU64,
    beginning: Instant,
}

struct Now {
    view: Arc<View>,
    keeper: Option<Arc<OwnedFd>>,
    notifiers: Vec<Weak<StripeNotifier>>,
}

/// Files and connection that the keeper has provided on a new connection.
pub(super) struct Shown {
    pub(super) view: Arc<View>,
    pub(super) keeper: Arc<OwnedFd>,
}

impl Shared {
    pub(super) fn new(
        terms: Terms,
        name: PathBuf,
        files: FileOptions,
        patience: Duration,
        shown: Shown,
    ) -> io::Result<Shared> {
        let geometry = shown.view.geometry;
        Ok(Shared {
            terms,
            name,
            files,
            patience,
            geometry,
            touched: Touched::new(geometry.stripes()),
            epoch: AtomicU64::new(0),
            is_away: AtomicBool::new(false),
            now: Mutex::new(Now {
                view: shown.view,
                keeper: Some(shown.keeper),
                notifiers: Vec::new(),
            }),
            end: StripeNotifier::new()?,
            has_ended: AtomicBool::new(false),
            heard: AtomicU64::new(0),
            connection: AtomicU64::new(0),
            beginning: Instant::now(),
        })
    }

    /// Ends the link's thread; called when the last user of the image has gone.
    pub(super) fn finish(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
        self.end.notify(None);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    pub(super) fn view(&self) -> Arc<View> {
        self.now.lock().view.clone()
    }

    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Relaxed)
    }

    /// Records that the keeper has sent a message.
    pub(super) fn has_heard(&self) {
        let now = self.beginning.elapsed().as_millis() as u64;
        self.heard.store(now, Ordering::Relaxed);
    }

    /// Returns whether a request that has waited for `waited` cannot expect data now. A live keeper
    /// would have reported by then that it waits, too.
    pub(super) fn is_hopeless(&self, waited: Duration) -> bool {
        let heard = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        let silence = self.beginning.elapsed().saturating_sub(heard);
        self.is_away() || waited.min(silence) > SILENCE
    }

    /// Returns the number of the present connection.
    #[inline]
    pub(super) fn connection(&self) -> u64 {
        self.connection.load(Ordering::Relaxed)
    }

    /// Sets whether the remote is away. Returns whether that has changed.
    pub(super) fn set_away(&self, is_away: bool) -> bool {
        let was = self.is_away.swap(is_away, Ordering::Relaxed);
        if was != is_away {
            self.notify(None);
        }
        was != is_away
    }

    /// Returns a new notifier, which is notified until its owner drops it.
    pub(super) fn listen(&self) -> io::Result<Arc<StripeNotifier>> {
        let stripe_notifier = Arc::new(StripeNotifier::new()?);
        let mut now = self.now.lock();
        now.notifiers
            .retain(|stripe_notifier| stripe_notifier.strong_count() > 0);
        now.notifiers.push(Arc::downgrade(&stripe_notifier));
        Ok(stripe_notifier)
    }

    pub(super) fn notify(&self, failed: Option<Run>) {
        let notifiers: Vec<_> = self
            .now
            .lock()
            .notifiers
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        notifiers
            .iter()
            .for_each(|stripe_notifier| stripe_notifier.notify(failed));
    }

    /// Records that the keeper has gone.
    pub(super) fn lose(&self) {
        self.now.lock().keeper = None;
        self.set_away(true);
    }

    /// Adopts a new connection to a keeper.
    pub(super) fn take_up(&self, shown: Shown) {
        let mut now = self.now.lock();
        if !Arc::ptr_eq(&now.view, &shown.view) {
            now.view = shown.view;
            self.epoch.fetch_add(1, Ordering::Release);
        }
        now.keeper = Some(shown.keeper);
        drop(now);
        self.has_heard();
        self.connection.fetch_add(1, Ordering::Relaxed);
        self.is_away.store(false, Ordering::Relaxed);
        // All waiting requests ask the new keeper again.
        self.notify(None);
    }

    /// Sends a message to the keeper. Returns false if it must be sent again later.
    pub(super) fn say(&self, message: &ToKeeper) -> bool {
        let keeper = self.now.lock().keeper.clone();
        keeper.is_some_and(|keeper| wire::send(&*keeper, message, &[]).is_ok())
    }

    /// Returns how many of the stripes are not in the cache.
    pub(super) fn missing(&self, view: &View, (first, count): Run) -> u32 {
        let missing = (first..first + count).filter(|&stripe| !view.live.has(stripe));
        missing.count() as u32
    }

    /// Requests those of the stripes that are not in the cache. Returns false if that must be
    /// repeated later.
    pub(super) fn want(&self, view: &View, (first, count): Run) -> bool {
        let mut missing: Option<Run> = None;
        let mut is_said = true;
        for stripe in first..first + count {
            match &mut missing {
                _ if view.live.has(stripe) => {}
                Some((first, count)) if *first + *count == stripe => *count += 1,
                other => {
                    is_said &= other.is_none_or(|run| self.say(&ToKeeper::Want(run)));
                    *other = Some((stripe, 1));
                }
            }
        }
        is_said && missing.is_none_or(|run| self.say(&ToKeeper::Want(run)))
    }

    /// Waits for the stripes and calls `read`, until a read has completed with the stripes present
    /// throughout. Blocking.
    pub(super) fn read_when_there(
        &self,
        run: Run,
        mut read: impl FnMut(&View) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut waiting: Option<(Arc<StripeNotifier>, Instant)> = None;
        loop {
            let view = self.view();
            if let Some(seen) = view.live.look(run) {
                read(&view)?;
                if view.live.look(run) == Some(seen) {
                    self.touched.note(run);
                    return Ok(());
                }
            }
            let (stripe_notifier, since) = match &waiting {
                Some(waiting) => waiting,
                None => waiting.insert((self.listen()?, Instant::now())),
            };
            let has_failed = stripe_notifier
                .take_failed()
                .into_iter()
                .any(|failed| overlap(failed, run));
            let waited = since.elapsed();
            if has_failed || (self.is_hopeless(waited) && waited > self.patience) {
                return Err(io::Error::other("the data cannot be fetched; see the log"));
            }
            self.want(&view, run);
            stripe_notifier.wait(AGAIN);
        }
    }
}

/// Time after which a silent keeper, while requests wait for it, counts as dead.
const SILENCE: Duration = Duration::from_secs(15);

/// Interval at which waiting requests check again without a notification.
pub(super) const AGAIN: Duration = Duration::from_millis(500);

/// Ends the thread that listens to the keeper when the image's last user has gone.
pub(super) struct User(pub(super) Arc<Shared>);

impl Drop for User {
    fn drop(&mut self) {
        self.0.finish();
    }
}
