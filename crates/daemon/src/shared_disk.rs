//! One disk with several users: a virtual machine and NBD clients.

use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Keepsake};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Counts who uses a disk: it is activated for the first user and deactivated
/// after the last.
///
/// A disk that wants a [`Keepsake`] (a qcow2 or QED image that is written to)
/// is different if it has a vhost-user socket. Only the virtual machine's front-end has that
/// memory, with what a killed server has left in it, and gives it when it
/// starts: whoever activates the image before that, without it, could write
/// over changes that the guest knows to be made. So the front-end is first,
/// and last: NBD clients are turned away while it is not there, and
/// disconnected when it leaves. (Then the image's locks pass to where the
/// guest goes, as they do without clients.)
pub struct SharedDisk {
    disk: Arc<dyn Disk>,
    /// For messages.
    name: String,
    /// Clients need the front-end.
    front_end_leads: bool,
    users: Mutex<Users>,
    /// A client has left.
    left: Condvar,
}

#[derive(Default)]
struct Users {
    front_end: bool,
    clients: usize,
    disconnect: Option<Disconnect>,
}

/// Makes the disk's clients leave; need not wait for it.
pub type Disconnect = Box<dyn Fn() + Send + Sync>;

impl SharedDisk {
    pub fn new(disk: Arc<dyn Disk>, name: String, has_front_end: bool) -> Arc<SharedDisk> {
        Arc::new(SharedDisk {
            front_end_leads: has_front_end && disk.keepsake_len() > 0 && !disk.info().read_only,
            disk,
            name,
            users: Mutex::default(),
            left: Condvar::new(),
        })
    }

    /// The disk for the vhost-user export.
    pub fn for_front_end(self: &Arc<Self>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            user: User::FrontEnd,
        })
    }

    /// The disk for NBD connections.
    pub fn for_clients(self: &Arc<Self>) -> Arc<dyn Disk> {
        Arc::new(View {
            shared: self.clone(),
            user: User::Client,
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
        if user == User::Client && self.front_end_leads && !users.front_end {
            return Err(DiskError::Unusable {
                path: PathBuf::from(&self.name),
                problem: "its virtual machine is not running; NBD clients of an image that has \
                          a vhost-user socket are served while it is"
                    .into(),
            });
        }
        if !users.front_end && users.clients == 0 {
            self.disk.activate()?;
        }
        match user {
            User::FrontEnd => users.front_end = true,
            User::Client => users.clients += 1,
        }
        Ok(())
    }

    fn deactivate(&self, user: User) -> Result<(), DiskError> {
        let mut users = self.users();
        match user {
            User::FrontEnd => {
                users.front_end = false;
                if self.front_end_leads {
                    users = self.wait_for_clients(users);
                }
            }
            User::Client => {
                users.clients -= 1;
                self.left.notify_all();
                // The front-end is waiting for the last one.
                if self.front_end_leads {
                    return Ok(());
                }
            }
        }
        match users.front_end || users.clients > 0 {
            true => Ok(()),
            false => self.disk.deactivate(),
        }
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
}

/// The disk as one kind of user has it.
struct View {
    shared: Arc<SharedDisk>,
    user: User,
}

impl Disk for View {
    fn info(&self) -> DiskInfo {
        self.shared.disk.info()
    }

    fn keepsake_len(&self) -> u64 {
        self.shared.disk.keepsake_len()
    }

    fn keep(&self, keepsake: Option<Keepsake>) {
        self.shared.disk.keep(keepsake);
    }

    fn connect_delay(&self) -> Duration {
        self.shared.disk.connect_delay()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.shared.activate(self.user)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.shared.deactivate(self.user)
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        self.shared.disk.channel(cx)
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

    fn shared(keepsake: u64, has_front_end: bool) -> (Arc<Counted>, Arc<SharedDisk>) {
        shared_as(keepsake, has_front_end, false)
    }

    fn shared_as(
        keepsake: u64,
        has_front_end: bool,
        read_only: bool,
    ) -> (Arc<Counted>, Arc<SharedDisk>) {
        let disk = Arc::new(Counted {
            keepsake,
            read_only,
            ..Counted::default()
        });
        let shared = SharedDisk::new(disk.clone(), "disk".into(), has_front_end);
        (disk, shared)
    }

    #[test]
    fn the_first_user_activates_and_the_last_deactivates() {
        for (keepsake, has_front_end, read_only) in [
            (0, false, false),
            (0, true, false),
            (8, false, false),
            (8, true, true),
        ] {
            let (disk, shared) = shared_as(keepsake, has_front_end, read_only);
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
        let (disk, shared) = shared(8, true);
        let (front_end, client) = (shared.for_front_end(), shared.for_clients());
        let error = client.activate().unwrap_err().to_string();
        assert!(error.contains("not running"), "{error}");
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
        assert!(client.activate().is_err());
        assert_eq!(disk.activations.load(SeqCst), 1);
    }
}
