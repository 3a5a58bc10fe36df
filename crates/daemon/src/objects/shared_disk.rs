//! One disk with several users: a virtual machine and NBD clients.

use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Keepsake, Resize};
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
pub struct SharedDisk {
    disk: Arc<dyn Disk>,
    /// For messages.
    name: String,
    /// Clients leave with the front-end.
    clients_follow: bool,
    /// Clients do not come before the front-end.
    front_end_first: bool,
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
    /// It waits for clients to leave, and then deactivates the disk.
    front_end_leaves: bool,
    clients: usize,
    /// Work on the disk goes on, which neither follows nor leads anybody.
    jobs: usize,
    disconnect: Option<Disconnect>,
}

impl Users {
    fn are_some(&self) -> bool {
        self.front_end || self.clients > 0 || self.jobs > 0
    }
}

/// Makes the disk's clients leave; need not wait for it.
pub type Disconnect = Box<dyn Fn() + Send + Sync>;

impl SharedDisk {
    /// `goes`: others use its image, too, and it has a vhost-user socket.
    pub fn new(
        disk: Arc<dyn Disk>,
        name: String,
        goes: bool,
        guards: Vec<Arc<dyn Guard>>,
    ) -> Arc<SharedDisk> {
        let clients_follow = goes && !disk.info().read_only;
        Arc::new(SharedDisk {
            clients_follow,
            front_end_first: clients_follow && disk.keepsake_len() > 0,
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

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn activate(&self, user: User) -> Result<(), DiskError> {
        // Held while the disk is activated: others need it active.
        let mut users = self.users();
        let is_led = self.front_end_first || self.clients_follow && users.front_end_came;
        if user == User::Client && is_led && !users.front_end {
            return Err(DiskError::Unusable {
                path: PathBuf::from(&self.name),
                problem: "its virtual machine is not running; NBD clients are let in while it is"
                    .into(),
            });
        }
        if user == User::FrontEnd {
            self.let_in()?;
        }
        if !users.are_some() {
            let activated = self.disk.activate();
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
            User::Job => users.jobs += 1,
        }
        Ok(())
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
                self.guards.iter().for_each(|guard| guard.left());
                if self.clients_follow {
                    users.front_end_leaves = true;
                    users = self.wait_for_clients(users);
                    users.front_end_leaves = false;
                }
            }
            User::Client => {
                users.clients -= 1;
                self.left.notify_all();
                if users.front_end_leaves {
                    return Ok(());
                }
            }
            User::Job => users.jobs -= 1,
        }
        match users.are_some() {
            true => Ok(()),
            false => self.disk.deactivate(),
        }
    }

    /// Gives it another size, whoever uses it. Nobody comes or goes meanwhile.
    pub fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let users = self.users();
        if users.are_some() || to.size.is_none() {
            return self.resize_active(to);
        }
        if self.front_end_first && !users.front_end_came {
            let problem = format!(
                "{}: its virtual machine has not connected yet, which may know of changes that are \
                 not in the image: resize the disk when it has",
                self.name
            );
            return Err(DiskError::Refused(problem));
        }
        self.disk.activate()?;
        let resized = self.resize_active(to);
        let deactivated = self.disk.deactivate();
        resized.and_then(|size| deactivated.map(|()| size))
    }

    fn resize_active(&self, to: &Resize) -> Result<u64, DiskError> {
        if to.size.is_some() && self.disk.info().read_only {
            let problem = format!("{}: is served for reading only", self.name);
            return Err(DiskError::Refused(problem));
        }
        self.disk.resize(to)
    }

    fn wait_for_clients<'a>(&'a self, mut users: MutexGuard<'a, Users>) -> MutexGuard<'a, Users> {
        while users.clients > 0 {
            if let Some(disconnect) = users.disconnect.take() {
                // Clients that leave need the lock.
                drop(users);
                disconnect();
                users = self.users();
                users.disconnect = Some(disconnect);
            }
            // Again after a while, for one that was just coming.
            let wait = self.left.wait_timeout(users, Duration::from_millis(100));
            users = wait.unwrap_or_else(|e| e.into_inner()).0;
        }
        users
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum User {
    FrontEnd,
    Client,
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
        let shared = SharedDisk::new(disk.clone(), "disk".into(), case.goes, Vec::new());
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
}
