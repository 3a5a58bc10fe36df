//! The thread that listens to the keeper, and connects to another one when it has ended.

use super::finder::{WELCOME, find};
use super::shared::{Shared, Shown};
use super::terms::Terms;
use super::view::View;
use super::wire::{self, FromKeeper, ToKeeper};
use crate::file::FileOptions;
use fathom_core::{DiskError, ThreadKind, thread_starts};
use fathom_units::redacted;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Intervals at which the keeper learns which stripes were used: first, while it records what boots
/// read, and later.
const OFTEN: Duration = Duration::from_millis(250);
const SELDOM: Duration = Duration::from_secs(10);
/// Time for which the shorter interval applies.
const BEGINNING: Duration = Duration::from_secs(120);

/// Maximum number of attempts to find a keeper that does not end at once.
const ATTEMPTS: u32 = 4;

/// Shortest and longest pause between two attempts to find a keeper.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// Stack size of the thread in bytes; it makes no deep calls.
const STACK: usize = 256 << 10;

/// Connects to the image's keeper, and makes the view that it provides. `now` is the previous view.
pub(super) fn connect(
    terms: &Terms,
    name: &Path,
    files: &FileOptions,
    now: Option<&Arc<View>>,
) -> Result<Shown, DiskError> {
    let unusable = |problem: String| DiskError::Unusable {
        path: name.to_owned(),
        problem,
    };
    let (keeper, first, given) = first_words(terms, name)?;
    let (geometry, image) = match first {
        FromKeeper::Welcome(geometry, image) => (geometry, image),
        FromKeeper::Refused(problem) => return Err(unusable(problem)),
        _ => {
            return Err(unusable(
                "unexpected first message from the cache's keeper".into(),
            ));
        }
    };
    geometry.check().map_err(unusable)?;
    if image.remote != terms.remote {
        let of = redacted(&image.remote);
        return Err(unusable(format!(
            "the cache belongs to another image, {of}"
        )));
    }
    let view = match now {
        Some(now) if (now.geometry, &now.image) != (geometry, &image) => {
            let problem = "the remote image was replaced, so overlays of the old image do not fit; restore \
                 the old image, or recreate the overlays";
            return Err(unusable(problem.into()));
        }
        Some(now) if now.is(&given) => now.clone(),
        _ => Arc::new(View::new(name, (geometry, image), given, files)?),
    };
    let keeper = Arc::new(keeper);
    Ok(Shown { view, keeper })
}

/// Connects to a keeper and receives its first message.
fn first_words(
    terms: &Terms,
    name: &Path,
) -> Result<(OwnedFd, FromKeeper, Vec<OwnedFd>), DiskError> {
    let failed = |what| {
        move |source| DiskError::Io {
            path: name.to_owned(),
            what,
            source,
        }
    };
    for attempt in 1.. {
        let keeper = find(terms).map_err(failed("cannot use its cache"))?;
        if !is_readable(&keeper, None, WELCOME) {
            return Err(DiskError::Unusable {
                path: name.to_owned(),
                problem: "no message from the cache's keeper".into(),
            });
        }
        match wire::receive::<FromKeeper>(&keeper) {
            Ok((first, given)) => return Ok((keeper, first, given)),
            // The keeper was about to end; the next attempt finds another one.
            Err(_) if attempt < ATTEMPTS => std::thread::sleep(PAUSE.0),
            Err(error) => return Err(failed("the cache's keeper has ended")(error)),
        }
    }
    unreachable!("it returns")
}

/// Returns whether the socket becomes readable within that time. Returns false early if the other
/// descriptor becomes readable first.
fn is_readable(socket: &OwnedFd, other: Option<BorrowedFd<'_>>, within: Duration) -> bool {
    let mut fds = vec![PollFd::new(socket, PollFlags::IN)];
    fds.extend(other.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    let within = Timespec::try_from(within).ok();
    matches!(poll(&mut fds, within.as_ref()), Ok(n) if n > 0) && !fds[0].revents().is_empty()
}

/// Starts the thread, which ends with the image's last user.
pub(super) fn start(shared: Arc<Shared>, keeper: Arc<OwnedFd>) -> io::Result<()> {
    let builder = Builder::new().name("base".into()).stack_size(STACK);
    builder.spawn(move || {
        thread_starts(ThreadKind::General);
        let mut keeper = Some(keeper);
        while let Some(current) = keeper.take().or_else(|| find_again(&shared)) {
            listen(&shared, &current);
            drop(current);
            if shared.has_ended() {
                return;
            }
            shared.lose();
        }
    })?;
    Ok(())
}

/// Reconnects to a keeper. Returns None if the image has no user any more.
fn find_again(shared: &Arc<Shared>) -> Option<Arc<OwnedFd>> {
    let mut pause = PAUSE.0;
    let mut is_told = false;
    loop {
        shared.end.wait(pause);
        if shared.has_ended() {
            return None;
        }
        match connect(
            &shared.terms,
            &shared.name,
            &shared.files,
            Some(&shared.view()),
        ) {
            Ok(shown) => {
                let keeper = shown.keeper.clone();
                if is_told {
                    tracing::warn!(
                        "{}: connected to a new keeper of the cache; requests resume",
                        shared.name.display()
                    );
                }
                shared.take_up(shown);
                return Some(keeper);
            }
            Err(error) if !is_told => {
                tracing::warn!("{error}; connecting again, and requests wait");
                is_told = true;
            }
            Err(_) => {}
        }
        pause = (2 * pause).min(PAUSE.1);
    }
}

/// Listens until the keeper or the image's use has ended.
fn listen(shared: &Shared, keeper: &OwnedFd) {
    let since = Instant::now();
    loop {
        let interval = match since.elapsed() < BEGINNING {
            true => OFTEN,
            false => SELDOM,
        };
        let is_there = is_readable(keeper, Some(shared.end.fd()), interval);
        if shared.has_ended() {
            return;
        }
        for runs in shared.touched.take() {
            // If a message is not sent, the keeper's information only becomes older.
            shared.say(&ToKeeper::Used(runs));
        }
        if is_there && !take_failed(shared, keeper) {
            return;
        }
    }
}

/// Receives and handles all available messages. Returns false if the connection has ended.
fn take_failed(shared: &Shared, keeper: &OwnedFd) -> bool {
    let mut is_news = false;
    let goes_on = loop {
        match wire::receive::<FromKeeper>(keeper) {
            Ok((message, _)) => {
                is_news = true;
                shared.has_heard();
                take_in(shared, message);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break true,
            Err(_) => break false,
        }
    };
    if is_news {
        shared.notify(None);
    }
    goes_on
}

fn take_in(shared: &Shared, message: FromKeeper) {
    let name = shared.name.display();
    let at = |stripe: u32| u64::from(stripe) * shared.geometry.stripe;
    match message {
        FromKeeper::Failed(run, problem) => {
            tracing::error!("{name}: reading at byte {} failed: {problem}", at(run.0));
            shared.notify(Some(run));
        }
        FromKeeper::Away(problem) if shared.set_away(true) => {
            tracing::warn!(
                "{name}: {problem}; cached data is served, and other requests wait while the \
                 server retries"
            );
        }
        FromKeeper::Back if shared.set_away(false) => {
            tracing::warn!("{name}: reachable again; requests resume")
        }
        FromKeeper::Away(_) | FromKeeper::Back | FromKeeper::Here(_) => {}
        // These arrive only as the first message.
        FromKeeper::Welcome(..) | FromKeeper::Refused(_) => {}
    }
}
