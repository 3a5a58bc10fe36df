//! The keeper of an image: handles events, fetches stripes, and limits the size of the cache.

use crate::about::{About, Origin};
use crate::backoff::Backoff;
use crate::cache::{self, Cache};
use crate::directory::{self, Others};
use crate::fetch::fetch_stripe;
use crate::known::{check_known, first_profile};
use crate::problem::Problem;
use crate::profile;
use crate::queue::{Early, Queue, Why};
use crate::rate::Rate;
use crate::remote::Remote;
use crate::users::{Event, Users};
use fathom_storage::cached::Terms;
use fathom_storage::cached::wire::{FromKeeper, Geometry, Identity, Run, ToKeeper, VERSION};
use fathom_units::{cause, redacted};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::timeout;

/// Time without users after which a keeper ends.
const LINGER: Duration = Duration::from_secs(10);
/// Interval at which new stripes are made durable; `LOOK` is that of examining other caches.
const SYNC: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_secs(10);
/// Time without any fetched stripe after which waiting users get the message that the remote does
/// not respond.
const SLOW: Duration = Duration::from_secs(5);
/// Maximum number of bytes in flight.
const FLYING: u64 = 16 << 20;
/// Number of attempts to fetch a stripe whose data is wrong.
const TRIES: u32 = 3;
/// Number of consecutive failures after which the keeper reconnects to the remote.
const ANEW: u32 = 3;

pub struct Keeper {
    terms: Terms,
    place: PathBuf,
    cache: Cache,
    origin: Origin,
    queue: Queue,
    users: Users,
    events: Sender<Event>,
    remote: Link,
    away: Option<Backoff>,
    rate: Rate,
    profile: Vec<u32>,
    /// For each failing stripe: the number of failures, and `landings` at the first failure.
    tries: HashMap<u32, (u32, u64)>,
    /// Number of stripes fetched successfully.
    landings: u64,
    others: Others,
    times: Times,
    is_syncing: bool,
    most: usize,
}

/// The connection to the remote.
enum Link {
    None,
    /// The remote is being opened.
    Opening,
    Open(Rc<Remote>),
}

/// The times of the last actions and events.
struct Times {
    synced: Instant,
    looked: Instant,
    landed: Instant,
    used: Instant,
    /// Time when there was no space for prefetching; `space` is when the file system was last full.
    full: Option<Instant>,
    space: Option<Instant>,
}

impl Keeper {
    /// Opens the existing cache, or creates a new one, for which the remote must be reachable.
    pub async fn open(terms: Terms, boot: &str, events: Sender<Event>) -> Result<Keeper, String> {
        let place = terms.place();
        let failed = |error: io::Error| {
            format!(
                "cannot read its cache at {}: {}",
                place.display(),
                cause(error)
            )
        };
        let about = About::read(&place).map_err(failed)?;
        if let Some(about) = &about {
            check_known(about, &terms)?;
        }
        let (origin, remote) = match about {
            Some(about) => (about.origin, Link::None),
            None => {
                let remote = Remote::open(&terms)
                    .await
                    .map_err(|problem| problem.text().to_owned())?;
                let origin = remote.origin().clone();
                cache::forget(&place).map_err(failed)?;
                (origin, Link::Open(Rc::new(remote)))
            }
        };
        let geometry = Geometry {
            version: VERSION,
            size: origin.size,
            stripe: origin.stripe,
        };
        geometry.check()?;
        let cache = Cache::open(&place, geometry, boot).map_err(failed)?;
        About::new(&terms.remote, origin.clone())
            .write(&place)
            .map_err(failed)?;
        let stripes = geometry.stripes() as u32;
        let of_its_own = match &remote {
            Link::Open(remote) => remote.profile(),
            _ => Vec::new(),
        };
        let now = Instant::now();
        // Limits the stripes in flight, so that they do not evict stripes that have not been read
        // yet.
        let part = terms.cache.size / 8;
        let mut keeper = Keeper {
            queue: Queue::new(stripes, geometry.stripe, part),
            users: Users::new(events.clone()),
            rate: Rate::new(terms.cache.rate, geometry.stripe),
            profile: first_profile(&terms, &place, &origin, of_its_own),
            most: (FLYING.min(part) / geometry.stripe).clamp(2, 64) as usize,
            tries: HashMap::new(),
            landings: 0,
            others: Others::default(),
            times: Times {
                synced: now,
                looked: now,
                landed: now,
                used: now,
                full: None,
                space: None,
            },
            is_syncing: false,
            away: None,
            terms,
            place,
            cache,
            origin,
            events,
            remote,
        };
        keeper.look_at_others();
        Ok(keeper)
    }

    /// Runs until the image has had no users for a while.
    pub async fn run(&mut self, events: &mut Receiver<Event>) {
        while !self.is_over() {
            self.fetch();
            match timeout(self.until(), events.recv()).await {
                Ok(Some(event)) => self.take_in(event),
                Ok(None) => return,
                Err(_) => {}
            }
            // Handles all events that are already queued.
            while let Ok(event) = events.try_recv() {
                self.take_in(event);
            }
            self.look_around();
        }
    }

    /// Makes all stripes durable before the keeper ends.
    pub fn finish(&mut self) {
        let synced = match self.cache.sync() {
            Ok(Some(sync)) => self.cache.synced(sync.run()),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        self.report(synced, "cannot flush");
    }

    fn is_over(&self) -> bool {
        self.users.is_empty() && !self.is_syncing && self.times.used.elapsed() > LINGER
    }

    /// Returns the time until the next action if no event occurs.
    fn until(&mut self) -> Duration {
        let away = self.away.as_ref().and_then(Backoff::left);
        let rate = self.rate.until().filter(|_| self.away.is_none());
        let all = [Some(SYNC), away, rate];
        all.into_iter().flatten().min().unwrap_or(SYNC)
    }

    fn take_in(&mut self, event: Event) {
        match event {
            Event::Came(socket) => {
                let image = Identity {
                    remote: self.terms.remote.clone(),
                    version: self.origin.version.clone(),
                };
                let away = self.away.as_ref().map(|away| &*away.text);
                let admitted = self.users.admit(socket, (&self.cache, image), away);
                self.report(admitted, "cannot be shown to a user");
                self.queue.begin(&self.profile);
            }
            Event::Said(user, ToKeeper::Want(run)) => self.want(user, run),
            Event::Said(user, ToKeeper::Used(runs)) => self.used(user, &runs),
            Event::Left(user) => {
                let recorded = self.users.leave(user);
                self.record(recorded);
            }
            Event::Landed(stripe, failures, outcome) => self.landed(stripe, failures, outcome),
            Event::Opened(outcome) => self.opened(outcome),
            Event::Synced(synced) => {
                self.is_syncing = false;
                let synced = self.cache.synced(synced);
                self.report(synced, "cannot flush");
            }
            Event::Others(others) => match others {
                Ok(others) => self.have_others(others),
                failed => self.report(failed.map(drop), "cannot read its neighbours"),
            },
        }
    }

    fn want(&mut self, user: u64, (first, count): Run) {
        let stripes = self.cache.geometry().stripes();
        if count == 0 || u64::from(first) + u64::from(count) > stripes {
            return drop(self.users.leave(user));
        }
        let cache = &self.cache;
        if !self
            .users
            .wants(user, (first, count), |stripe| cache.has(stripe))
        {
            return drop(self.users.leave(user));
        }
        if (first..first + count).all(|stripe| cache.has(stripe)) {
            // All stripes have been fetched in the meantime.
            return self.users.say(user, &FromKeeper::Here((first, count)));
        }
        self.queue.want((first, count), |stripe| cache.has(stripe));
    }

    fn used(&mut self, user: u64, runs: &[Run]) {
        let stripes = self.cache.geometry().stripes() as u32;
        let all: u64 = runs.iter().map(|(_, count)| u64::from(*count)).sum();
        if all > u64::from(stripes) {
            // A user may report each stripe at most once.
            return drop(self.users.leave(user));
        }
        for (first, count) in runs {
            let end = first.saturating_add(*count).min(stripes);
            (*first..end).for_each(|stripe| self.cache.is_used(stripe));
        }
        let recorded = self.users.uses(user, runs);
        self.record(recorded);
    }

    fn record(&mut self, recorded: Option<Vec<u32>>) {
        let Some(recorded) = recorded else {
            return;
        };
        self.profile = profile::merge(recorded, &self.profile);
        let written = profile::write(&self.place, &self.profile, self.origin.stripe);
        self.report(written, "cannot record the blocks that boots read");
    }

    /// Starts to fetch the next stripes, as far as the limits allow.
    fn fetch(&mut self) {
        while self.may_fetch() {
            let early = self.early();
            let (cache, users) = (&self.cache, &self.users);
            let has = |stripe| cache.has(stripe);
            let waits = |stripe| users.wait_for(stripe);
            let Some((stripe, why)) = self.queue.next(early, has, waits) else {
                return;
            };
            if !self.make_room(why) {
                // Prefetching must not evict stripes in use, so it pauses for a while.
                self.queue.put_back(stripe);
                self.times.full = Some(Instant::now());
                continue;
            }
            let Link::Open(remote) = &self.remote else {
                self.queue.put_back(stripe);
                return self.open_remote();
            };
            if why == Why::Early {
                self.rate.take(self.origin.stripe);
            }
            let (remote, events) = (remote.clone(), self.events.clone());
            let (data, (at, _)) = (self.cache.data.clone(), self.cache.range(stripe));
            let failures = self.cache.failures();
            spawn_local(async move {
                let outcome = fetch_stripe(&remote, data, stripe, at).await;
                let landed = Event::Landed(stripe, failures, outcome);
                let _ = events.send(landed).await;
            });
        }
    }

    /// Returns what may be prefetched now.
    fn early(&mut self) -> Early {
        let is_full = self.times.full.is_some_and(|then| then.elapsed() < LOOK);
        match self.queue.in_flight() < self.most / 2 && !is_full && self.rate.may() {
            false => Early::Nothing,
            true if self.users.wait() => Early::Profile,
            true if self.users.is_empty() => Early::Nothing,
            true => Early::All,
        }
    }

    fn may_fetch(&self) -> bool {
        let flying = self.queue.in_flight();
        match &self.away {
            // While the remote is away, one stripe at a time tests whether it is back.
            Some(away) => {
                flying == 0 && away.left().is_none() && !matches!(self.remote, Link::Opening)
            }
            None => flying < self.most && !matches!(self.remote, Link::Opening),
        }
    }

    fn open_remote(&mut self) {
        self.remote = Link::Opening;
        let (terms, events) = (self.terms.clone(), self.events.clone());
        spawn_local(async move {
            // This task has no timeout, because only one attempt may run at a time. Waiting users
            // get the message that the server does not respond.
            let opened = Remote::open(&terms).await;
            let _ = events.send(Event::Opened(opened.map(Rc::new))).await;
        });
    }

    fn opened(&mut self, outcome: Result<Rc<Remote>, Problem>) {
        self.remote = Link::None;
        match outcome {
            Ok(remote) if *remote.origin() == self.origin => self.remote = Link::Open(remote),
            Ok(_) => self.fails(format!(
                "the image was replaced since its cache at {} was made; disks made on the old \
                 image must not be used with the new one (if there are none, 'fathom base \
                 remove' removes the cache)",
                self.place.display()
            )),
            Err(problem) => self.fails(problem.text().to_owned()),
        }
    }

    fn fails(&mut self, text: String) {
        match &mut self.away {
            Some(away) => away.again(text),
            None => {
                self.users.tell_all(&FromKeeper::Away(text.clone()));
                self.away = Some(Backoff::new(text));
            }
        }
        if self
            .away
            .as_ref()
            .is_some_and(|away| away.times % ANEW == 0)
            && matches!(self.remote, Link::Open(_))
        {
            self.remote = Link::None;
        }
    }

    fn landed(&mut self, stripe: u32, failures: u64, outcome: Result<(), Problem>) {
        self.times.landed = Instant::now();
        let is_away = matches!(outcome, Err(Problem::Away(_) | Problem::Full));
        if !is_away && self.away.take().is_some() {
            self.users.tell_all(&FromKeeper::Back);
        }
        self.landings += u64::from(outcome.is_ok());
        match outcome {
            Ok(()) if failures != self.cache.failures() => {
                // The failed sync may have lost this stripe's data.
                let cleared = self.cache.clear(stripe);
                self.report(cleared, "cannot be emptied");
                self.queue.failed(stripe);
            }
            Ok(()) => {
                self.cache.add(stripe);
                self.queue.landed(stripe);
                self.tries.remove(&stripe);
                self.users.tell(stripe, None);
            }
            Err(problem) => {
                let cleared = self.cache.clear(stripe);
                self.report(cleared, "cannot be emptied");
                self.has_not_come(stripe, problem);
            }
        }
    }

    fn has_not_come(&mut self, stripe: u32, problem: Problem) {
        match problem {
            Problem::Away(text) => {
                // If other stripes are fetched successfully, the remote is not away and only this
                // stripe fails.
                if self.others_come(stripe) {
                    self.queue.landed(stripe);
                    return self.users.tell(stripe, Some(&text));
                }
                self.queue.failed(stripe);
                self.fails(text);
            }
            Problem::Full => {
                self.queue.failed(stripe);
                self.make_space();
            }
            Problem::Wrong(text) => {
                let (tries, _) = self.tries.entry(stripe).or_insert((0, self.landings));
                *tries += 1;
                if *tries < TRIES {
                    return self.queue.failed(stripe);
                }
                self.tries.remove(&stripe);
                self.queue.landed(stripe);
                self.users.tell(stripe, Some(&text));
            }
            Problem::Never(text) => {
                self.queue.landed(stripe);
                self.users.tell(stripe, Some(&text));
            }
        }
    }

    /// Returns whether this stripe has failed repeatedly while others were fetched successfully.
    fn others_come(&mut self, stripe: u32) -> bool {
        let (tries, since) = self.tries.entry(stripe).or_insert((0, self.landings));
        *tries += 1;
        let is_so = *tries > TRIES && self.landings > *since;
        if is_so {
            self.tries.remove(&stripe);
        }
        is_so
    }

    /// Evicts a part of the cache because the file system is full.
    ///
    /// Several writes may find it full at once, so this happens at most every 200 ms.
    fn make_space(&mut self) {
        if self
            .times
            .space
            .is_some_and(|then| then.elapsed() < Duration::from_millis(200))
        {
            return;
        }
        self.times.space = Some(Instant::now());
        let present = self.cache.present() as usize;
        let evicted = self.cache.evict((present / 8).max(1));
        if !matches!(evicted, Ok(1..)) {
            let place = self.place.display();
            let text = format!("no space is left on the file system of its cache at {place}");
            self.fails(text);
        }
    }

    /// Returns the number of bytes that this cache may always use, even if other caches need space.
    fn share(&self) -> u64 {
        self.terms.cache.size / (u64::from(self.others.used) + 1)
    }

    /// Makes space for one more stripe.
    ///
    /// Returns false if that would evict another stripe for a prefetched one.
    fn make_room(&mut self, why: Why) -> bool {
        let flying = self.queue.in_flight() as u64 * self.origin.stripe;
        let own = self.cache.taken() + flying;
        let most = self
            .terms
            .cache
            .size
            .saturating_sub(self.others.taken)
            .max(self.share());
        if own <= most {
            return true;
        }
        if why == Why::Early {
            return false;
        }
        let part = u64::from(self.cache.present() / 32) * self.origin.stripe;
        self.shrink((own - most).max(part));
        true
    }

    /// Stores the state of the other caches. If this cache exceeds its share, shrinks it for the
    /// others.
    fn have_others(&mut self, others: Others) {
        self.others = others;
        let own = self.cache.taken();
        let excess = (own + others.taken).saturating_sub(self.terms.cache.size);
        let more = own.saturating_sub(self.share());
        if excess.min(more) > 0 {
            self.shrink(excess.min(more));
        }
    }

    fn shrink(&mut self, bytes: u64) {
        let evicted = self
            .cache
            .evict(bytes.div_ceil(self.origin.stripe) as usize);
        self.report(evicted.map(drop), "cannot shrink");
    }

    /// Performs the periodic work.
    fn look_around(&mut self) {
        if !self.users.is_empty() {
            self.times.used = Instant::now();
        }
        if self.times.synced.elapsed() >= SYNC && !self.is_syncing {
            self.times.synced = Instant::now();
            match self.cache.sync() {
                Ok(Some(sync)) => {
                    self.is_syncing = true;
                    let events = self.events.clone();
                    spawn_local(async move {
                        if let Ok(synced) = spawn_blocking(|| sync.run()).await {
                            let _ = events.send(Event::Synced(synced)).await;
                        }
                    });
                }
                Ok(None) => {}
                failed => self.report(failed.map(drop), "cannot flush"),
            }
        }
        if self.times.looked.elapsed() >= LOOK {
            self.look_at_others();
        }
        if self.away.is_none() && self.users.wait() && self.times.landed.elapsed() > SLOW {
            self.fails("its server does not respond".into());
        }
        if !self.users.wait() {
            self.times.landed = Instant::now();
        }
    }

    fn look_at_others(&mut self) {
        self.times.looked = Instant::now();
        let (dir, own, most) = (
            self.terms.cache.dir.clone(),
            self.place.clone(),
            self.terms.cache.size,
        );
        let (taken, events) = (self.cache.taken(), self.events.clone());
        spawn_local(async move {
            let too_many = move |others: u64| others + taken > most;
            let others = spawn_blocking(move || directory::others(&dir, &own, too_many)).await;
            if let Ok(others) = others {
                let _ = events.send(Event::Others(others)).await;
            }
        });
    }

    /// Logs an internal error, of which users see only the consequences.
    fn report(&self, outcome: io::Result<()>, what: &str) {
        if let Err(error) = outcome {
            tracing::error!(
                "{}: cache at {} {what}: {}",
                redacted(&self.terms.remote),
                self.place.display(),
                cause(error)
            );
        }
    }
}
