//! What all users of one base image in this process know.

use super::bell::{Bell, overlap};
use super::terms::Terms;
use super::touched::Touched;
use super::view::View;
use super::wire::{self, Geometry, Run, ToKeeper};
use crate::file::FileOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    pub(super) terms: Terms,
    /// As users write it.
    pub(super) name: PathBuf,
    /// How the cache's data is read.
    pub(super) files: FileOptions,
    /// So long requests wait for what does not come.
    pub(super) patience: Duration,
    pub(super) geometry: Geometry,
    pub(super) touched: Touched,
    /// It grows with each view.
    epoch: AtomicU64,
    /// Nothing comes from afar, or there is no keeper.
    is_away: AtomicBool,
    now: Mutex<Now>,
    /// Nobody uses the image any more: then this is rung.
    pub(super) end: Bell,
    has_ended: AtomicBool,
    /// When the keeper last said something, in milliseconds after the beginning, or a connection began.
    heard: AtomicU64,
    /// It grows with each connection.
    connection: AtomicU64,
    beginning: Instant,
}

struct Now {
    view: Arc<View>,
    keeper: Option<Arc<OwnedFd>>,
    bells: Vec<Weak<Bell>>,
}

/// What the keeper has shown, when there was a connection.
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
                bells: Vec::new(),
            }),
            end: Bell::new()?,
            has_ended: AtomicBool::new(false),
            heard: AtomicU64::new(0),
            connection: AtomicU64::new(0),
            beginning: Instant::now(),
        })
    }

    /// Nobody uses the image any more.
    pub(super) fn finish(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
        self.end.ring(None);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn view(&self) -> Arc<View> {
        self.now().view.clone()
    }

    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Relaxed)
    }

    /// The keeper has said something.
    pub(super) fn has_heard(&self) {
        let now = self.beginning.elapsed().as_millis() as u64;
        self.heard.store(now, Ordering::Relaxed);
    }

    /// For somebody who has waited for so long: whether nothing is to be hoped for now. (A keeper that lives says
    /// by then that it waits, too.)
    pub(super) fn is_hopeless(&self, waited: Duration) -> bool {
        let heard = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        let silence = self.beginning.elapsed().saturating_sub(heard);
        self.is_away() || waited.min(silence) > SILENCE
    }

    /// Of a keeper that was asked something.
    #[inline]
    pub(super) fn connection(&self) -> u64 {
        self.connection.load(Ordering::Relaxed)
    }

    /// Whether that is news.
    pub(super) fn set_away(&self, is_away: bool) -> bool {
        let was = self.is_away.swap(is_away, Ordering::Relaxed);
        if was != is_away {
            self.ring(None);
        }
        was != is_away
    }

    /// A bell that is rung from now on, as long as its owner has it.
    pub(super) fn listen(&self) -> io::Result<Arc<Bell>> {
        let bell = Arc::new(Bell::new()?);
        let mut now = self.now();
        now.bells.retain(|bell| bell.strong_count() > 0);
        now.bells.push(Arc::downgrade(&bell));
        Ok(bell)
    }

    pub(super) fn ring(&self, failed: Option<Run>) {
        let bells: Vec<_> = self.now().bells.iter().filter_map(Weak::upgrade).collect();
        bells.iter().for_each(|bell| bell.ring(failed));
    }

    /// There is no keeper any more.
    pub(super) fn lose(&self) {
        self.now().keeper = None;
        self.set_away(true);
    }

    /// There is one again.
    pub(super) fn take_up(&self, shown: Shown) {
        let mut now = self.now();
        if !Arc::ptr_eq(&now.view, &shown.view) {
            now.view = shown.view;
            self.epoch.fetch_add(1, Ordering::Release);
        }
        now.keeper = Some(shown.keeper);
        drop(now);
        self.has_heard();
        self.connection.fetch_add(1, Ordering::Relaxed);
        self.is_away.store(false, Ordering::Relaxed);
        // Everybody asks again.
        self.ring(None);
    }

    /// False: it has to be said again later.
    pub(super) fn say(&self, message: &ToKeeper) -> bool {
        let keeper = self.now().keeper.clone();
        keeper.is_some_and(|keeper| wire::send(&*keeper, message, &[]).is_ok())
    }

    /// How many of the stripes are not there.
    pub(super) fn missing(&self, view: &View, (first, count): Run) -> u32 {
        let missing = (first..first + count).filter(|&stripe| !view.live.has(stripe));
        missing.count() as u32
    }

    /// Asks for those of the stripes that are not there. False: that has to be done again later.
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

    /// For who waits: once all of the stripes are there, `read` reads them, until it has read what was there
    /// all the time.
    pub(super) fn read_when_there(
        &self,
        run: Run,
        mut read: impl FnMut(&View) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut waiting: Option<(Arc<Bell>, Instant)> = None;
        loop {
            let view = self.view();
            if let Some(seen) = view.live.look(run) {
                read(&view)?;
                if view.live.look(run) == Some(seen) {
                    self.touched.note(run);
                    return Ok(());
                }
            }
            let (bell, since) = match &waiting {
                Some(waiting) => waiting,
                None => waiting.insert((self.listen()?, Instant::now())),
            };
            let has_failed = bell.hear().into_iter().any(|failed| overlap(failed, run));
            let waited = since.elapsed();
            if has_failed || (self.is_hopeless(waited) && waited > self.patience) {
                return Err(io::Error::other("the data cannot be fetched; see the log"));
            }
            self.want(&view, run);
            bell.wait(AGAIN);
        }
    }
}

/// A keeper that says nothing for so long, and is waited for, does not live.
const SILENCE: Duration = Duration::from_secs(15);

/// After so long one looks again, whatever has been heard.
pub(super) const AGAIN: Duration = Duration::from_millis(500);

/// The image's last user ends the thread that listens to the keeper.
pub(super) struct User(pub(super) Arc<Shared>);

impl Drop for User {
    fn drop(&mut self) {
        self.0.finish();
    }
}
