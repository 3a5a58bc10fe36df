//! The users of an image. A task for each user receives its messages.

use crate::cache::{Cache, Synced};
use crate::directory::Others;
use crate::problem::Problem;
use crate::profile::Recording;
use crate::remote::Remote;
use fathom_storage::cached::wire::{self, FromKeeper, Identity, MAX_WANTED, Run, ToKeeper};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::Sender;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;

/// Maximum number of users.
const MOST: usize = 4096;

/// The events that a keeper handles.
pub enum Event {
    /// A user has connected.
    Came(OwnedFd),
    /// A user has sent a message.
    Said(u64, ToKeeper),
    /// A user has disconnected or sent an invalid message.
    Left(u64),
    /// A fetch has ended: the stripe, the cache's number of failures at its start, and the result.
    Landed(u32, u64, Result<(), Problem>),
    /// The attempt to open the remote has ended.
    Opened(Result<Rc<Remote>, Problem>),
    Synced(Synced),
    /// The other caches have been examined.
    Others(io::Result<Others>),
}

struct User {
    socket: Rc<AsyncFd<OwnedFd>>,
    task: JoinHandle<()>,
    recording: Option<Recording>,
    /// Number of stripes for which the user waits.
    waits: usize,
}

impl Drop for User {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub struct Users {
    all: BTreeMap<u64, User>,
    next: u64,
    events: Sender<Event>,
    /// Users that wait, by stripe.
    waiting: HashMap<u32, Vec<u64>>,
}

impl Users {
    pub fn new(events: Sender<Event>) -> Users {
        Users {
            all: BTreeMap::new(),
            next: 0,
            events,
            waiting: HashMap::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns whether any user waits for a stripe.
    pub fn wait(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns whether any user waits for this stripe.
    pub fn wait_for(&self, stripe: u32) -> bool {
        self.waiting.contains_key(&stripe)
    }

    /// Sends the files of the cache to a user that has connected, and adds the user.
    pub fn admit(
        &mut self,
        socket: OwnedFd,
        (cache, image): (&Cache, Identity),
        away: Option<&str>,
    ) -> io::Result<()> {
        if self.all.len() >= MOST {
            let _ = wire::send(&socket, &FromKeeper::Refused("too many users".into()), &[]);
            return Ok(());
        }
        rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK)?;
        let files = cache.shown()?;
        let files = [files[0].as_fd(), files[1].as_fd()];
        wire::send(
            &socket,
            &FromKeeper::Welcome(*cache.geometry(), image),
            &files,
        )?;
        if let Some(away) = away {
            wire::send(&socket, &FromKeeper::Away(away.to_owned()), &[])?;
        }
        let socket = Rc::new(watched(socket)?);
        let number = self.next;
        self.next += 1;
        let task = spawn_local(listen(number, socket.clone(), self.events.clone()));
        let user = User {
            socket,
            task,
            recording: Some(Recording::new()),
            waits: 0,
        };
        self.all.insert(number, user);
        Ok(())
    }

    /// Removes a user. Returns its recorded reads if they were a boot.
    pub fn leave(&mut self, number: u64) -> Option<Vec<u32>> {
        let mut user = self.all.remove(&number)?;
        if user.waits > 0 {
            self.waiting.retain(|_, users| {
                users.retain(|&other| other != number);
                !users.is_empty()
            });
        }
        user.recording.take().and_then(Recording::end)
    }

    /// Registers that a user waits for a range. `has` returns whether a stripe is in the cache.
    ///
    /// Returns false if the user waits for more stripes than the protocol allows.
    pub fn wants(&mut self, number: u64, (first, count): Run, has: impl Fn(u32) -> bool) -> bool {
        let Some(user) = self.all.get_mut(&number) else {
            return true;
        };
        if count as usize > MAX_WANTED {
            return false;
        }
        for stripe in first..first + count {
            if has(stripe) {
                continue;
            }
            let waiting = self.waiting.entry(stripe).or_default();
            if !waiting.contains(&number) {
                waiting.push(number);
                user.waits += 1;
            }
        }
        user.waits <= MAX_WANTED
    }

    /// Records that a user has read these stripes. Returns the recording when the user's boot is
    /// over.
    pub fn uses(&mut self, number: u64, runs: &[Run]) -> Option<Vec<u32>> {
        let recording = &mut self.all.get_mut(&number)?.recording;
        let current = recording.as_mut()?;
        current.note(
            runs.iter()
                .flat_map(|(first, count)| *first..first.saturating_add(*count)),
        );
        match current.is_over() {
            true => recording.take().and_then(Recording::end),
            false => None,
        }
    }

    /// Tells all users that wait for a stripe that it is available, or why fetching it failed.
    pub fn tell(&mut self, stripe: u32, failed: Option<&str>) {
        let run = (stripe, 1);
        let message = match failed {
            None => FromKeeper::Here(run),
            Some(text) => FromKeeper::Failed(run, text.to_owned()),
        };
        for number in self.waiting.remove(&stripe).unwrap_or_default() {
            if let Some(user) = self.all.get_mut(&number) {
                user.waits -= 1;
            }
            self.say(number, &message);
        }
    }

    pub fn tell_all(&mut self, message: &FromKeeper) {
        let all: Vec<u64> = self.all.keys().copied().collect();
        all.into_iter().for_each(|number| self.say(number, message));
    }

    pub fn say(&mut self, number: u64, message: &FromKeeper) {
        let Some(user) = self.all.get(&number) else {
            return;
        };
        if wire::send(user.socket.get_ref(), message, &[]).is_err() {
            // The user does not read its messages. After the disconnection, the user may connect
            // again.
            self.leave(number);
        }
    }
}

/// Registers a socket with the runtime, so that tasks can wait until it is readable.
pub fn watched(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the registered value owns the descriptor and lends it out only by reference. The
    // descriptor therefore stays open and unchanged until the value is dropped, which first ends
    // the registration.
    let watched = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
    Ok(watched?)
}

/// Receives the messages of a user and waits while the queue of events is full.
async fn listen(number: u64, socket: Rc<AsyncFd<OwnedFd>>, events: Sender<Event>) {
    loop {
        let Ok(mut ready) = socket.readable().await else {
            break;
        };
        match ready.try_io(|socket| wire::receive::<ToKeeper>(socket.get_ref())) {
            Ok(Ok((said, _))) => {
                if events.send(Event::Said(number, said)).await.is_err() {
                    return;
                }
            }
            Ok(Err(_)) => break,
            Err(_) => {}
        }
    }
    let _ = events.send(Event::Left(number)).await;
}

/// Accepts connections of users.
pub async fn accept(listener: AsyncFd<OwnedFd>, events: Sender<Event>) {
    use rustix::net::{SocketFlags, accept_with};
    loop {
        let Ok(mut ready) = listener.readable().await else {
            return;
        };
        match ready.try_io(|listener| Ok(accept_with(listener.get_ref(), SocketFlags::CLOEXEC)?)) {
            Ok(Ok(socket)) => {
                if events.send(Event::Came(socket)).await.is_err() {
                    return;
                }
            }
            // The error may be temporary, for example because too many files are open.
            Ok(Err(_)) => sleep(Duration::from_millis(100)).await,
            Err(_) => {}
        }
    }
}
