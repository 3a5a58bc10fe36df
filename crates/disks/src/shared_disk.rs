//! One disk with several users: a virtual machine and NBD clients.

mod alone;

use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Keepsake};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Counts who uses a disk: it is activated for the first user and deactivated
/// after the last.
///
/// An image that is written to and has a vhost-user socket goes where its
/// virtual machine goes: when the front-end leaves, its locks must be free at
/// once for the server at the end of a live migration. So NBD clients are
/// disconnected then, and turned away until the front-end is back.
///
/// If it wants a [`Keepsake`] (qcow2 and QED images do), they are turned away
/// before the front-end comes for the first time, too. Only the front-end has
/// that memory, with what a killed server has left in it: whoever changed the
/// image before that is read could write over what the guest knows to be
/// done.
///
/// Of a disk that may go to another server, clients only read, and stay when the
/// front-end leaves. With a keepsake they are interrupted whenever it comes or
/// leaves: it is read when the disk is activated, and all is in the image when it
/// was deactivated.
pub struct SharedDisk {
    disk: Arc<dyn Disk>,
    /// For messages.
    name: String,
    /// Clients leave with the front-end.
    clients_follow: bool,
    /// Clients do not come before the front-end.
    front_end_first: bool,
    /// Clients stay without the front-end, once it has been there.
    clients_stay: bool,
    users: Mutex<Users>,
    guards: Vec<Arc<dyn Guard>>,
    /// A client has left.
    left: Condvar,
}

/// Hears of front-ends, and may refuse them.
pub trait Guard: Send + Sync {
    /// One wants the disk. The error says why it does not get it.
    fn comes(&self) -> Result<(), String>;

    /// It has left, with all that it had in flight; or did not get the disk.
    fn left(&self);
}

#[derive(Default)]
struct Users {
    front_end: bool,
    /// It has been there.
    front_end_came: bool,
    /// It comes or leaves, and waits for clients to leave first.
    front_end_changes: bool,
    clients: usize,
    /// Those that read it beside its users; they leave with the front-end in any case.
    followers: usize,
    /// Work on the disk goes on, which neither follows nor leads anybody.
    jobs: usize,
    /// It was deactivated at the end of a job, and is to be activated again.
    is_between: bool,
    disconnect: Option<Disconnect>,
    /// Likewise, for followers.
    have_followers_leave: Option<Disconnect>,
}

impl Users {
    fn are_some(&self) -> bool {
        self.front_end || self.clients + self.followers + self.jobs > 0
    }
}

/// Makes the disk's clients leave; need not wait for it.
pub type Disconnect = Box<dyn Fn() + Send + Sync>;

impl SharedDisk {
    /// `goes`: others use its image, too, and it has a vhost-user socket. `clients_stay`: it may be taken
    /// over by a client.
    pub fn new(
        disk: Arc<dyn Disk>,
        name: String,
        goes: bool,
        clients_stay: bool,
        guards: Vec<Arc<dyn Guard>>,
    ) -> Arc<SharedDisk> {
        let goes = goes && !disk.info().read_only;
        Arc::new(SharedDisk {
            clients_follow: goes && !clients_stay,
            front_end_first: goes && disk.keepsake_len() > 0,
            clients_stay,
            disk,
            name,
            users: Mutex::default(),
            guards,
            left: Condvar::new(),
        })
    }

    /// The disk for the vhost-user export.
    pub fn for_front_end(self: &Arc<Self>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: self.disk.clone(),
            user: User::FrontEnd,
        })
    }

    /// The disk for NBD connections.
    pub fn for_clients(self: &Arc<Self>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: self.disk.clone(),
            user: User::Client,
        })
    }

    /// `below`, which is the disk without its filters, for whoever comes and goes like a client.
    pub fn for_follower(self: &Arc<Self>, below: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: below,
            user: User::Follower,
        })
    }

    /// `below`, which is the disk or a part of it, for work on it.
    pub fn for_job(self: &Arc<Self>, below: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: below,
            user: User::Job,
        })
    }

    /// How to make clients leave.
    pub fn set_disconnect(&self, disconnect: Disconnect) {
        self.users().disconnect = Some(disconnect);
    }

    /// How to make followers leave.
    pub fn set_followers_leave(&self, end: Disconnect) {
        self.users().have_followers_leave = Some(end);
    }

    /// Somebody uses it.
    pub fn is_used(&self) -> bool {
        self.users().are_some()
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn activate(&self, user: User) -> Result<(), DiskError> {
        // Held while the disk is activated: others need it active.
        let mut users = self.users();
        let mut is_active = false;
        if matches!(user, User::Client | User::Follower) && self.are_kept_out(&users) {
            return Err(DiskError::Unusable {
                path: PathBuf::from(&self.name),
                problem:
                    "the virtual machine of the disk is not running; NBD clients are admitted \
                     while it runs"
                        .into(),
            });
        }
        if user == User::FrontEnd {
            self.let_in()?;
            (users, is_active) = self.clear(users);
        }
        if !users.are_some() {
            let ended = if is_active {
                self.disk.deactivate()
            } else {
                Ok(())
            };
            let activated = ended.and_then(|()| self.disk.activate());
            if activated.is_err() && user == User::FrontEnd {
                self.guards.iter().for_each(|guard| guard.left());
            }
            activated?;
        }
        match user {
            User::FrontEnd => {
                users.front_end = true;
                users.front_end_came = true;
            }
            User::Client => users.clients += 1,
            User::Follower => users.followers += 1,
            User::Job => users.jobs += 1,
        }
        Ok(())
    }

    fn are_kept_out(&self, users: &Users) -> bool {
        if users.front_end_changes {
            return true;
        }
        let needs_it = self.front_end_first || self.clients_follow && users.front_end_came;
        let has_had_it = self.clients_stay && users.front_end_came;
        needs_it && !users.front_end && !has_had_it
    }

    /// A front-end, if nobody has anything against it.
    fn let_in(&self) -> Result<(), DiskError> {
        for (n, guard) in self.guards.iter().enumerate() {
            if let Err(problem) = guard.comes() {
                self.guards[..n].iter().for_each(|guard| guard.left());
                let path = PathBuf::from(&self.name);
                return Err(DiskError::Unusable { path, problem });
            }
        }
        Ok(())
    }

    fn deactivate(&self, user: User) -> Result<(), DiskError> {
        let mut users = self.users();
        match user {
            User::FrontEnd => {
                users.front_end = false;
                users = self.wait_for_followers(users);
                users = match self.clients_follow {
                    true => self.wait_for_clients(users),
                    false => self.clear(users).0,
                };
            }
            User::Client => {
                users.clients -= 1;
                self.left.notify_all();
                if users.front_end_changes {
                    return Ok(());
                }
            }
            User::Follower => {
                users.followers -= 1;
                self.left.notify_all();
                if users.front_end_changes {
                    return Ok(());
                }
            }
            User::Job => {
                if users.front_end && self.front_end_first && users.jobs == 1 {
                    self.activate_again(&mut users)?;
                }
                users.jobs -= 1;
            }
        }
        let done = match users.are_some() {
            true => Ok(()),
            false => self.disk.deactivate(),
        };
        // (All is where others find it.)
        if user == User::FrontEnd && done.is_ok() {
            if self.clients_stay {
                // It is not theirs.
                self.disk.keep(None);
            }
            self.guards.iter().for_each(|guard| guard.left());
        }
        done
    }

    /// A front-end has come while there was a job, with a keepsake that nobody has looked at. Nothing is in
    /// flight: all wait for the job's end.
    fn activate_again(&self, users: &mut Users) -> Result<(), DiskError> {
        if !std::mem::replace(&mut users.is_between, true) {
            self.disk.deactivate()?;
        }
        self.disk.activate()?;
        users.is_between = false;
        Ok(())
    }

    /// Has clients leave who stay else, where the front-end's coming and leaving concerns them. True: there
    /// were some, and the disk is still active.
    fn clear<'a>(&'a self, users: MutexGuard<'a, Users>) -> (MutexGuard<'a, Users>, bool) {
        let are_some = users.clients + users.followers > 0;
        match self.clients_stay && self.front_end_first && are_some {
            true => (self.wait_for_clients(self.wait_for_followers(users)), true),
            false => (users, false),
        }
    }

    fn wait_for_clients<'a>(&'a self, users: MutexGuard<'a, Users>) -> MutexGuard<'a, Users> {
        self.have_leave(users, |users| users.clients, |users| &mut users.disconnect)
    }

    fn wait_for_followers<'a>(&'a self, users: MutexGuard<'a, Users>) -> MutexGuard<'a, Users> {
        self.have_leave(
            users,
            |users| users.followers,
            |users| &mut users.have_followers_leave,
        )
    }

    fn have_leave<'a>(
        &'a self,
        mut users: MutexGuard<'a, Users>,
        count: fn(&Users) -> usize,
        how: fn(&mut Users) -> &mut Option<Disconnect>,
    ) -> MutexGuard<'a, Users> {
        users.front_end_changes = true;
        while count(&users) > 0 {
            if let Some(leave) = how(&mut users).take() {
                // Those that leave need the lock.
                drop(users);
                leave();
                users = self.users();
                // (Another one may have come.)
                how(&mut users).get_or_insert(leave);
            }
            // Again after a while, for one that was just coming.
            let wait = self.left.wait_timeout(users, Duration::from_millis(100));
            users = wait.unwrap_or_else(|e| e.into_inner()).0;
        }
        users.front_end_changes = false;
        users
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum User {
    FrontEnd,
    Client,
    Follower,
    Job,
}

/// The disk as one kind of user has it.
struct View {
    shared: Arc<SharedDisk>,
    disk: Arc<dyn Disk>,
    user: User,
}

impl Disk for View {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn keepsake_len(&self) -> u64 {
        self.disk.keepsake_len()
    }

    fn keep(&self, keepsake: Option<Keepsake>) {
        self.disk.keep(keepsake);
    }

    fn connect_delay(&self) -> Duration {
        self.disk.connect_delay()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.shared.activate(self.user)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.shared.deactivate(self.user)
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        self.disk.channel(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};

    /// A disk that counts.
    #[derive(Default)]
    struct Counted {
        active: AtomicI32,
        activations: AtomicUsize,
        keepsake: u64,
        read_only: bool,
    }

    impl Disk for Counted {
        fn info(&self) -> DiskInfo {
            DiskInfo {
                size: 512,
                block_size: 512,
                physical_block_size: 512,
                optimal_io_size: 0,
                read_only: self.read_only,
                write_cache: true,
                discard: None,
                write_zeroes: None,
            }
        }

        fn keepsake_len(&self) -> u64 {
            self.keepsake
        }

        fn activate(&self) -> Result<(), DiskError> {
            self.activations.fetch_add(1, SeqCst);
            assert_eq!(self.active.fetch_add(1, SeqCst), 0);
            Ok(())
        }

        fn deactivate(&self) -> Result<(), DiskError> {
            assert_eq!(self.active.fetch_sub(1, SeqCst), 1);
            Ok(())
        }

        fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
            unreachable!("nobody asks")
        }
    }

    struct Case {
        keepsake: u64,
        goes: bool,
        read_only: bool,
    }

    fn shared(case: &Case) -> (Arc<Counted>, Arc<SharedDisk>) {
        let disk = Arc::new(Counted {
            keepsake: case.keepsake,
            read_only: case.read_only,
            ..Counted::default()
        });
        let shared = SharedDisk::new(disk.clone(), "disk".into(), case.goes, false, Vec::new());
        (disk, shared)
    }

    #[test]
    fn the_first_user_activates_and_the_last_deactivates() {
        for (keepsake, goes, read_only) in [
            (0, false, false),
            (0, true, true),
            (8, false, false),
            (8, true, true),
        ] {
            let (disk, shared) = shared(&Case {
                keepsake,
                goes,
                read_only,
            });
            let (front_end, client) = (shared.for_front_end(), shared.for_clients());
            client.activate().unwrap();
            client.activate().unwrap();
            front_end.activate().unwrap();
            client.deactivate().unwrap();
            client.deactivate().unwrap();
            assert_eq!(disk.active.load(SeqCst), 1);
            client.activate().unwrap();
            front_end.deactivate().unwrap();
            assert_eq!(disk.active.load(SeqCst), 1);
            client.deactivate().unwrap();
            assert_eq!(disk.active.load(SeqCst), 0);
            assert_eq!(disk.activations.load(SeqCst), 1);
        }
    }

    #[test]
    fn an_image_goes_with_its_front_end() {
        for keepsake in [0, 8] {
            let (disk, shared) = shared(&Case {
                keepsake,
                goes: true,
                read_only: false,
            });
            let (front_end, client) = (shared.for_front_end(), shared.for_clients());
            let early = client.activate();
            assert_eq!(early.is_ok(), keepsake == 0);
            if early.is_ok() {
                client.deactivate().unwrap();
                assert_eq!(disk.active.load(SeqCst), 0);
            }
            front_end.activate().unwrap();
            client.activate().unwrap();
            client.activate().unwrap();
            client.deactivate().unwrap();
            let asked = Arc::new(AtomicUsize::new(0));
            let disconnect = {
                let (asked, client) = (asked.clone(), client.clone());
                move || {
                    if asked.fetch_add(1, SeqCst) == 0 {
                        let client = client.clone();
                        std::thread::spawn(move || client.deactivate().unwrap());
                    }
                }
            };
            shared.set_disconnect(Box::new(disconnect));
            front_end.deactivate().unwrap();
            assert!(asked.load(SeqCst) > 0);
            assert_eq!(disk.active.load(SeqCst), 0);
            let error = client.activate().unwrap_err().to_string();
            assert!(error.contains("not running"), "{error}");
            front_end.activate().unwrap();
            client.activate().unwrap();
        }
    }

    /// A disk that a client may take over; how often clients were disconnected.
    fn movable(keepsake: u64) -> (Arc<Counted>, Arc<SharedDisk>, Arc<AtomicUsize>) {
        let disk = Arc::new(Counted {
            keepsake,
            ..Counted::default()
        });
        let shared = SharedDisk::new(disk.clone(), "disk".into(), true, true, Vec::new());
        let asked = Arc::new(AtomicUsize::new(0));
        let (client, count) = (shared.for_clients(), asked.clone());
        shared.set_disconnect(Box::new(move || {
            if count.fetch_add(1, SeqCst).is_multiple_of(2) {
                let client = client.clone();
                std::thread::spawn(move || client.deactivate().unwrap());
            }
        }));
        (disk, shared, asked)
    }

    #[test]
    fn clients_of_a_disk_that_moves_stay_without_its_front_end() {
        let (disk, shared, asked) = movable(0);
        let (front_end, client) = (shared.for_front_end(), shared.for_clients());
        client.activate().unwrap();
        front_end.activate().unwrap();
        front_end.deactivate().unwrap();
        assert_eq!(disk.active.load(SeqCst), 1);
        client.deactivate().unwrap();
        client.activate().unwrap();
        assert_eq!((disk.activations.load(SeqCst), asked.load(SeqCst)), (2, 0));
    }

    /// It is read when the disk is activated, and what it was for is done when it was deactivated.
    #[test]
    fn a_keepsake_is_read_whenever_the_front_end_comes() {
        let (disk, shared, asked) = movable(8);
        let (front_end, client) = (shared.for_front_end(), shared.for_clients());
        assert!(client.activate().is_err());
        front_end.activate().unwrap();
        client.activate().unwrap();
        front_end.deactivate().unwrap();
        assert!(asked.load(SeqCst) > 0);
        assert_eq!(disk.active.load(SeqCst), 0);
        client.activate().unwrap();
        assert_eq!(disk.activations.load(SeqCst), 2);
        // (The disconnecting client of the test answers every other time.)
        asked.store(0, SeqCst);
        front_end.activate().unwrap();
        assert!(asked.load(SeqCst) > 0);
        assert_eq!(
            (disk.active.load(SeqCst), disk.activations.load(SeqCst)),
            (1, 3)
        );
    }

    #[test]
    fn a_keepsake_of_who_came_during_a_job_is_read_at_its_end() {
        for (keepsake, activations) in [(0, 1), (8, 2)] {
            let (disk, shared, _) = movable(keepsake);
            let front_end = shared.for_front_end();
            let job = shared.for_job(disk.clone());
            job.activate().unwrap();
            front_end.activate().unwrap();
            assert_eq!(disk.activations.load(SeqCst), 1);
            job.deactivate().unwrap();
            assert_eq!(disk.activations.load(SeqCst), activations);
            assert_eq!(disk.active.load(SeqCst), 1);
            front_end.deactivate().unwrap();
            assert_eq!(disk.active.load(SeqCst), 0);
        }
    }
}
