//! A vhost-user-blk back-end: serves a disk to virtual machines.
//!
//! A [`VhostUser`] serves one disk on one socket, to one front-end (QEMU, cloud-hypervisor, ...) at
//! a time. The thread in [`VhostUser::serve`] handles the protocol. Requests do not pass through
//! that thread: each running virtqueue is a [`Source`](fathom_core::Source) of one of the disk's
//! workers.
//!
//! - `codec` parses bytes and file descriptors into typed requests,
//! - `session` holds the state of one connection,
//! - `serve` accepts front-ends, waits and dispatches,
//! - `handover` hands over an export to another process,
//! - `mapping`, `backing` and `alarm` manage the front-end's memory; `share` limits it.
//!
//! "vhost-user" in comments is QEMU's docs/interop/vhost-user.rst.

mod alarm;
mod backing;
mod codec;
#[cfg(feature = "testing")]
pub mod fuzz;
mod handover;
mod mapping;
mod serve;
mod session;
mod share;

use crate::watch::{Visit, Watch};
use fathom_core::{Disk, EventNotifier, WorkerHandle, WrapSource};
use fathom_sockets::Listener;
use fathom_virtio::BlkDevice;
use handover::Freeze;
pub use handover::{Arrival, Arriving, ExportState, Frozen, Halting, arrival};
use parking_lot::Mutex;
use share::Share;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::time::Duration;

/// How the disk is presented to the guest.
#[derive(Clone)]
pub struct Options {
    /// Maximum number of virtqueues that a front-end may use, 1 to 256. QEMU by default uses one
    /// per vCPU, and refuses a back-end that supports fewer.
    pub max_queues: u16,
    /// Offer packed virtqueues (VIRTIO_F_RING_PACKED).
    pub packed: bool,
    /// Serial of the disk in the guest; at most 20 bytes are used.
    pub serial: String,
    /// Wraps queues to observe or disturb them.
    pub wrap: Option<WrapSource>,
    /// Timeout for the rest of a message, and for the first message when another front-end waits.
    pub patience: Duration,
    /// Callback for each front-end that attaches or detaches.
    pub watch: Option<Watch>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_queues: 64,
            packed: false,
            serial: "fathom".to_owned(),
            wrap: None,
            patience: Duration::from_secs(10),
            watch: None,
        }
    }
}

/// State of a [`VhostUser`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Process id of the connected front-end; 0 if the process is not visible from this PID
    /// namespace.
    pub peer_pid: Option<i32>,
    /// Number of virtqueues that workers are serving.
    pub queues_running: usize,
    /// The front-end keeps an in-flight area, but the area has no room for the state that the disk
    /// wants to save.
    pub keeps_nothing: bool,
}

/// The export of one disk.
pub struct VhostUser {
    shared: Shared,
}

/// State that outlives a connection.
struct Shared {
    disk: Arc<dyn Disk>,
    device: Arc<BlkDevice>,
    workers: Arc<[WorkerHandle]>,
    max_queues: u16,
    packed: bool,
    wrap: Option<WrapSource>,
    patience: Duration,
    watch: Option<Watch>,
    stop: EventNotifier,
    config_change: EventNotifier,
    /// Raised when `freeze` is set.
    handover: EventNotifier,
    freeze: Mutex<Option<Freeze>>,
    status: Mutex<Status>,
    /// Process id of the last front-end.
    last_pid: AtomicI32,
    /// This export's share of the process's address space.
    share: Arc<Share>,
}

impl Shared {
    /// Locks the pending request to freeze.
    fn freeze(&self) -> parking_lot::MutexGuard<'_, Option<Freeze>> {
        self.freeze.lock()
    }

    fn update_status(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock());
    }
}

impl Shared {
    /// Notifies the watcher that a front-end has connected or disconnected.
    fn tell(&self, visit: Visit, pid: i32) {
        if let Some(watch) = &self.watch {
            watch(visit, &format!("process {pid}"));
        }
    }
}

impl VhostUser {
    /// Creates an export of `disk`. Queue i is served by worker i modulo the number of `workers`,
    /// of which there must be at least one.
    ///
    /// # Errors
    /// InvalidInput if `max_queues` is not from 1 to 256, or an error of eventfd(2).
    ///
    /// # Panics
    /// Panics if `workers` is empty.
    pub fn new(
        disk: Arc<dyn Disk>,
        workers: Arc<[WorkerHandle]>,
        options: Options,
    ) -> io::Result<VhostUser> {
        assert!(!workers.is_empty(), "a disk has a worker");
        let invalid = |problem| io::Error::new(io::ErrorKind::InvalidInput, problem);
        if !(1..=256).contains(&options.max_queues) {
            return Err(invalid("the number of queues must be from 1 to 256"));
        }
        let device = BlkDevice::new(disk.info(), &options.serial, options.max_queues);
        Ok(VhostUser {
            shared: Shared {
                disk,
                device: Arc::new(device),
                workers,
                max_queues: options.max_queues,
                packed: options.packed,
                wrap: options.wrap,
                patience: options.patience,
                watch: options.watch,
                stop: EventNotifier::new()?,
                config_change: EventNotifier::new()?,
                handover: EventNotifier::new()?,
                freeze: Mutex::default(),
                status: Mutex::default(),
                last_pid: AtomicI32::new(0),
                share: Share::new(),
            },
        })
    }

    /// Serves one front-end after the other on this thread, until [`VhostUser::stop`].
    ///
    /// Whenever a front-end disconnects, and at the end, all queues are drained and its memory is
    /// unmapped. An error of a connection ends that connection and is logged.
    ///
    /// # Errors
    /// An error of the listening socket or of poll(2).
    pub fn serve(&self, listener: &Listener) -> io::Result<()> {
        serve::serve(&self.shared, listener, None)
    }

    /// Like [`VhostUser::serve`], but continues where a predecessor has stopped.
    pub fn serve_on(&self, arrival: Arrival) -> io::Result<()> {
        handover::serve_on(&self.shared, arrival)
    }

    /// Stops reading from the front-end and accepting others until the returned value is dropped.
    /// Queues keep running. The front-end may be in the middle of a message. The error is for the
    /// user.
    pub fn freeze(&self) -> Result<Frozen, String> {
        Frozen::new(&self.shared)
    }

    /// Makes `serve` return, now and in later calls. Callable from any thread.
    pub fn stop(&self) {
        self.shared.stop.notify();
    }

    /// Tells the front-end that the configuration space has changed, after a change of
    /// [`VhostUser::device`] such as its size. Callable from any thread.
    pub fn config_changed(&self) {
        self.shared.config_change.notify();
    }

    /// Returns the device that the guest sees.
    pub fn device(&self) -> &Arc<BlkDevice> {
        &self.shared.device
    }

    /// Returns the state of the export at this moment.
    pub fn status(&self) -> Status {
        *self.shared.status.lock()
    }
}
