//! A disk with several users: a front-end, clients, and jobs. The clients are NBD clients, and the
//! programs that have the disk's file open.

mod alone;

use fathom_core::{Disk, DiskError, DiskLayer, Resize};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Counts the users of a disk: the first user activates the disk, and the last user deactivates the
/// disk.
///
/// After a live migration, the server at the destination locks the image. A writable image with a
/// vhost-user socket must therefore be unlocked as soon as the front-end detaches. The NBD clients
/// of such a disk are disconnected then. Further clients are rejected until a front-end attaches
/// again.
///
/// If the image needs a [`SavedState`] (qcow2 and QED images do), clients are also rejected before
/// the front-end attaches for the first time. Only the front-end has the saved state that a killed
/// server may have left in the saved state. A client that wrote to the image earlier could
/// overwrite writes that the guest knows to be complete.
///
/// Clients of a disk that another server may take over (`nbd-move`) can only read, and stay
/// connected when the front-end detaches. If the image needs saved state, these clients are
/// disconnected whenever a front-end attaches or detaches. The activation reads the saved state,
/// and the deactivation writes everything to the image.
pub struct SharedDisk {
    disk: Arc<dyn Disk>,
    /// Name of the disk in errors.
    name: String,
    /// Whether clients are disconnected when the front-end detaches.
    clients_follow: bool,
    /// Whether clients are rejected before the front-end attaches for the first time.
    front_end_first: bool,
    /// Whether clients stay connected, and are admitted, after the front-end has detached.
    clients_stay: bool,
    users: Mutex<Users>,
    guards: Vec<Arc<dyn Guard>>,
    /// Notified when a client or a follower has detached.
    left: Condvar,
}

/// Is notified of front-ends, and can reject them.
pub trait Guard: Send + Sync {
    /// Called when a front-end attaches. The error says why the front-end is rejected.
    fn comes(&self) -> Result<(), String>;

    /// Called when the front-end has detached, with no requests in flight, or was not attached
    /// after all.
    fn left(&self);
}

#[derive(Default)]
struct Users {
    front_end: FrontEnd,
    clients: usize,
    /// Number of jobs (backups, mirrors, streams) that read the disk; they always detach with the
    /// front-end.
    followers: usize,
    /// Number of operations that use the disk independently of the front-end and clients.
    jobs: usize,
    /// Whether the disk was deactivated at the end of a job, and has not been activated again yet.
    is_between: bool,
    disconnect: Option<Disconnect>,
    /// Makes the followers detach.
    have_followers_leave: Option<Disconnect>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FrontEnd {
    /// None has been attached so far.
    #[default]
    NotYet,
    /// The front-end is attaching or detaching, and waits until clients and followers have
    /// detached.
    Changing,
    Attached,
    Detached,
}

impl Users {
    fn are_some(&self) -> bool {
        self.front_end == FrontEnd::Attached || self.clients + self.followers + self.jobs > 0
    }
}

/// Begins to disconnect the users of one kind; need not wait until they have detached.
pub type Disconnect = Box<dyn Fn() + Send + Sync>;

impl SharedDisk {
    /// Creates the shared disk, without users. `goes`: the disk has a vhost-user socket, and its
    /// image must be unlocked when the front-end detaches. `clients_stay`: another server may take
    /// the disk over.
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
            front_end_first: goes && disk.saved_state_len() > 0,
            clients_stay,
            disk,
            name,
            users: Mutex::default(),
            guards,
            left: Condvar::new(),
        })
    }

    /// Returns the disk for the vhost-user export.
    pub fn for_front_end(self: &Arc<Self>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: self.disk.clone(),
            user: User::FrontEnd,
        })
    }

    /// Returns the disk for NBD connections and mounted files.
    pub fn for_clients(self: &Arc<Self>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: self.disk.clone(),
            user: User::Client,
        })
    }

    /// Returns `below`, which is the disk without its filters, for a job that detaches when the
    /// front-end does.
    pub fn for_follower(self: &Arc<Self>, below: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: below,
            user: User::Follower,
        })
    }

    /// Returns `below`, which is the disk or a layer of the disk, for an operation on the disk.
    pub fn for_job(self: &Arc<Self>, below: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            disk: below,
            user: User::Job,
        })
    }

    /// Adds a function that disconnects clients of one kind.
    pub fn add_disconnect(&self, disconnect: Disconnect) {
        let mut users = self.users.lock();
        users.disconnect = Some(match users.disconnect.take() {
            None => disconnect,
            Some(others) => Box::new(move || {
                others();
                disconnect();
            }),
        });
    }

    /// Sets the function that makes followers detach.
    pub fn set_followers_leave(&self, end: Disconnect) {
        self.users.lock().have_followers_leave = Some(end);
    }

    /// Whether the disk has any users.
    pub fn is_used(&self) -> bool {
        self.users.lock().are_some()
    }

    fn activate(&self, user: User) -> Result<(), DiskError> {
        // The lock is held while the disk is activated: other users must find an active disk.
        let mut users = self.users.lock();
        let mut is_active = false;
        if matches!(user, User::Client | User::Follower) && self.are_kept_out(&users) {
            return Err(DiskError::Unusable {
                path: PathBuf::from(&self.name),
                problem:
                    "the virtual machine of the disk is not running; clients are admitted while it \
                     runs"
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
            User::FrontEnd => users.front_end = FrontEnd::Attached,
            User::Client => users.clients += 1,
            User::Follower => users.followers += 1,
            User::Job => users.jobs += 1,
        }
        Ok(())
    }

    fn are_kept_out(&self, users: &Users) -> bool {
        match users.front_end {
            FrontEnd::NotYet => self.front_end_first,
            FrontEnd::Changing => true,
            FrontEnd::Attached => false,
            FrontEnd::Detached => {
                (self.front_end_first || self.clients_follow) && !self.clients_stay
            }
        }
    }

    /// Asks all guards whether a front-end may attach. After an error, no guard counts the
    /// front-end as attached.
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
        let mut users = self.users.lock();
        match user {
            User::FrontEnd => {
                users.front_end = FrontEnd::Detached;
                users = self.wait_for_followers(users);
                users = match self.clients_follow {
                    true => self.wait_for_clients(users),
                    false => self.clear(users).0,
                };
            }
            User::Client => {
                users.clients -= 1;
                self.left.notify_all();
                if users.front_end == FrontEnd::Changing {
                    return Ok(());
                }
            }
            User::Follower => {
                users.followers -= 1;
                self.left.notify_all();
                if users.front_end == FrontEnd::Changing {
                    return Ok(());
                }
            }
            User::Job => {
                if users.front_end == FrontEnd::Attached && self.front_end_first && users.jobs == 1
                {
                    self.activate_again(&mut users)?;
                }
                users.jobs -= 1;
            }
        }
        let done = match users.are_some() {
            true => Ok(()),
            false => self.disk.deactivate(),
        };
        // (The guest's writes have now reached the place where other users of the disk read them.)
        if user == User::FrontEnd && done.is_ok() {
            if self.clients_stay {
                // The saved state is the front-end's: clients that use the disk without it must not
                // use its memory.
                self.disk.set_saved_state(None);
            }
            self.guards.iter().for_each(|guard| guard.left());
        }
        done
    }

    /// Activates the disk again, to read the saved state of a front-end that attached while a job
    /// used the disk. No requests are in flight: all users wait for the end of the job.
    fn activate_again(&self, users: &mut Users) -> Result<(), DiskError> {
        if !std::mem::replace(&mut users.is_between, true) {
            self.disk.deactivate()?;
        }
        self.disk.activate()?;
        users.is_between = false;
        Ok(())
    }

    /// Disconnects the clients that stay without a front-end, if the image needs saved state. True:
    /// clients or followers were disconnected, and the disk is still active.
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
        let front_end = std::mem::replace(&mut users.front_end, FrontEnd::Changing);
        while count(&users) > 0 {
            if let Some(leave) = how(&mut users).take() {
                // Detaching users need the lock.
                drop(users);
                leave();
                users = self.users.lock();
                // (The function may have been replaced meanwhile.)
                how(&mut users).get_or_insert(leave);
            }
            // Repeated after a pause: the function may have missed a user that was just attaching.
            self.left.wait_for(&mut users, Duration::from_millis(100));
        }
        users.front_end = front_end;
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

/// The disk as one kind of user sees it.
struct View {
    shared: Arc<SharedDisk>,
    disk: Arc<dyn Disk>,
    user: User,
}

impl DiskLayer for View {
    fn below(&self) -> &dyn Disk {
        &*self.disk
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.shared.activate(self.user)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.shared.deactivate(self.user)
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        self.shared.resize(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_core::{Channel, Cx, DiskInfo};
    use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};

    /// A disk that counts its activations.
    #[derive(Default)]
    struct Counted {
        active: AtomicI32,
        activations: AtomicUsize,
        saved_state: u64,
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

        fn saved_state_len(&self) -> u64 {
            self.saved_state
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
        saved_state: u64,
        goes: bool,
        read_only: bool,
    }

    fn shared(case: &Case) -> (Arc<Counted>, Arc<SharedDisk>) {
        let disk = Arc::new(Counted {
            saved_state: case.saved_state,
            read_only: case.read_only,
            ..Counted::default()
        });
        let shared = SharedDisk::new(disk.clone(), "disk".into(), case.goes, false, Vec::new());
        (disk, shared)
    }

    #[test]
    fn the_first_user_activates_and_the_last_deactivates() {
        for (saved_state, goes, read_only) in [
            (0, false, false),
            (0, true, true),
            (8, false, false),
            (8, true, true),
        ] {
            let (disk, shared) = shared(&Case {
                saved_state,
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
        for saved_state in [0, 8] {
            let (disk, shared) = shared(&Case {
                saved_state,
                goes: true,
                read_only: false,
            });
            let (front_end, client) = (shared.for_front_end(), shared.for_clients());
            let early = client.activate();
            assert_eq!(early.is_ok(), saved_state == 0);
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
            shared.add_disconnect(Box::new(disconnect));
            front_end.deactivate().unwrap();
            assert!(asked.load(SeqCst) > 0);
            assert_eq!(disk.active.load(SeqCst), 0);
            let error = client.activate().unwrap_err().to_string();
            assert!(error.contains("not running"), "{error}");
            front_end.activate().unwrap();
            client.activate().unwrap();
        }
    }

    /// Returns a disk that a client may take over, and the number of calls that disconnect clients.
    fn movable(saved_state: u64) -> (Arc<Counted>, Arc<SharedDisk>, Arc<AtomicUsize>) {
        let disk = Arc::new(Counted {
            saved_state,
            ..Counted::default()
        });
        let shared = SharedDisk::new(disk.clone(), "disk".into(), true, true, Vec::new());
        let asked = Arc::new(AtomicUsize::new(0));
        let (client, count) = (shared.for_clients(), asked.clone());
        shared.add_disconnect(Box::new(move || {
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

    /// The activation reads the saved state. After the deactivation, the image has everything that
    /// the saved state stood for.
    #[test]
    fn saved_state_is_read_when_a_front_end_attaches() {
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
        // (The test's client detaches at every other call only, beginning with the first one.)
        asked.store(0, SeqCst);
        front_end.activate().unwrap();
        assert!(asked.load(SeqCst) > 0);
        assert_eq!(
            (disk.active.load(SeqCst), disk.activations.load(SeqCst)),
            (1, 3)
        );
    }

    #[test]
    fn saved_state_is_read_when_a_job_ends() {
        for (saved_state, activations) in [(0, 1), (8, 2)] {
            let (disk, shared, _) = movable(saved_state);
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
