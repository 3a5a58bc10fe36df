//! A disk for virtual machines: a vhost-user-blk back-end.
//!
//! One [`VhostUser`] serves one disk at one socket, to one front-end (QEMU,
//! cloud-hypervisor, ...) at a time. The thread in [`VhostUser::serve`] speaks
//! the protocol; requests never pass through it: each running virtqueue is a
//! [`Source`](fathom_core::Source) of one of the disk's workers.
//!
//! - `codec` turns bytes and file descriptors into typed requests,
//! - `session` is what one connection has set up, by concern,
//! - `serve` accepts, waits and dispatches,
//! - `handover` takes all of it to another process,
//! - `mapping`, `backing` and `alarm` hold the front-end's memory, `share` bounds it.
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

use crate::signal::Signal;
use crate::watch::{Visit, Watch};
use fathom_core::{Disk, WorkerHandle, WrapSource};
use fathom_sockets::Listener;
use fathom_virtio::BlkDevice;
use handover::Freeze;
pub use handover::{Arrival, Arriving, ExportState, Frozen, Halting, arrival};
use share::Share;
use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How to present the disk.
#[derive(Clone)]
pub struct Options {
    /// The most virtqueues that a front-end may use: a ceiling, not a
    /// promise; 1 to 256. QEMU refuses a back-end with fewer than it has
    /// vCPUs (unless told otherwise).
    pub max_queues: u16,
    /// What the guest sees as the disk's serial; at most 20 bytes count.
    pub serial: String,
    /// For what watches or disturbs queues from outside.
    pub wrap: Option<WrapSource>,
    /// How long a front-end may take for the rest of a message; and for its
    /// first one, when another waits to be served.
    pub patience: Duration,
    pub watch: Option<Watch>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_queues: 64,
            serial: "fathom".to_owned(),
            wrap: None,
            patience: Duration::from_secs(10),
            watch: None,
        }
    }
}

/// What a [`VhostUser`] is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The front-end's process, if one is connected (0: not visible from
    /// this PID namespace).
    pub peer_pid: Option<i32>,
    /// Virtqueues that workers are serving.
    pub queues_running: usize,
    /// The front-end keeps an area for requests in flight, in which there is no room for what the disk wants to be
    /// kept.
    pub keeps_nothing: bool,
}

/// The export of one disk.
pub struct VhostUser {
    shared: Shared,
}

/// What outlives a connection.
struct Shared {
    disk: Arc<dyn Disk>,
    device: Arc<BlkDevice>,
    workers: Arc<[WorkerHandle]>,
    max_queues: u16,
    wrap: Option<WrapSource>,
    patience: Duration,
    watch: Option<Watch>,
    stop: Signal,
    config_change: Signal,
    /// See `freeze`.
    handover: Signal,
    freeze: Mutex<Option<Freeze>>,
    status: Mutex<Status>,
    /// The last front-end's process.
    last_pid: AtomicI32,
    /// Of this process's address space.
    share: Arc<Share>,
}

impl Shared {
    /// Who wants the serving thread to stand still.
    fn freeze(&self) -> std::sync::MutexGuard<'_, Option<Freeze>> {
        self.freeze.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn update_status(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock().unwrap_or_else(|e| e.into_inner()));
    }
}

impl Shared {
    /// A front-end comes or goes.
    fn tell(&self, visit: Visit, pid: i32) {
        if let Some(watch) = &self.watch {
            watch(visit, &format!("process {pid}"));
        }
    }
}

impl VhostUser {
    /// Export `disk`, whose workers are `workers` (at least one): queue i is
    /// served by worker i modulo their number.
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
                wrap: options.wrap,
                patience: options.patience,
                watch: options.watch,
                stop: Signal::new()?,
                config_change: Signal::new()?,
                handover: Signal::new()?,
                freeze: Mutex::default(),
                status: Mutex::default(),
                last_pid: AtomicI32::new(0),
                share: Share::new(),
            },
        })
    }

    /// Serve one front-end after the other, on this thread, until
    /// [`VhostUser::stop`]. Then, as whenever a front-end goes, all queues
    /// are drained and its memory is unmapped. An error of one connection
    /// ends that connection and is logged; only an error of the listening
    /// socket or of poll(2) ends serving.
    pub fn serve(&self, listener: &Listener) -> io::Result<()> {
        serve::serve(&self.shared, listener, None)
    }

    /// Like [`VhostUser::serve`], from where a predecessor has stopped.
    pub fn serve_on(&self, arrival: Arrival) -> io::Result<()> {
        handover::serve_on(&self.shared, arrival)
    }

    /// Stops reading from the front-end and accepting others until what this returns is dropped. The
    /// front-end may be in the middle of a message. Queues run meanwhile. The error is for the user.
    pub fn freeze(&self) -> Result<Frozen, String> {
        Frozen::new(&self.shared)
    }

    /// Make `serve` return, now and from now on. From any thread.
    pub fn stop(&self) {
        self.shared.stop.raise();
    }

    /// Tell the front-end that the configuration space has changed, after
    /// changing [`VhostUser::device`] (its size). From any thread.
    pub fn config_changed(&self) {
        self.shared.config_change.raise();
    }

    /// What the guest sees.
    pub fn device(&self) -> &Arc<BlkDevice> {
        &self.shared.device
    }

    pub fn status(&self) -> Status {
        *self.shared.status.lock().unwrap_or_else(|e| e.into_inner())
    }
}
