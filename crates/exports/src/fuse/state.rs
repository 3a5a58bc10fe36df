//! The state of a mounted file: its attachment to the disk, its open handles, and its buffers.

use super::device::Device;
use super::source::{CAPACITY, FuseSource, Queue};
use super::task::{MAX_LEN, Progress, Task};
use crate::watch::{Visit, Watch};
use fathom_core::{AlignedBuffer, Disk, DiskError, SourceId, WorkerHandle};
use fuser::Errno;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The disk whose content a file has.
#[derive(Clone)]
pub struct Backend {
    /// Must accept requests of any alignment, as the storages' `ByteDisk` does.
    pub disk: Arc<dyn Disk>,
    /// The workers of the disk. The first one serves the file.
    pub workers: Arc<[WorkerHandle]>,
    /// Is notified when programs begin and cease to use the file.
    pub watch: Watch,
}

/// The file's relation to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No program has the file open, or only handles that have become invalid.
    Idle,
    /// The disk is in use, and a worker has the source.
    Attached,
    /// The disk is not in use, and requests wait.
    Held,
}

/// State of a file that its threads share.
pub(super) struct Shared {
    pub(super) file: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    /// Locked before `state`, while the source is attached or detached.
    place: Mutex<Place>,
    queue: Queue,
}

struct State {
    backend: Backend,
    phase: Phase,
    /// Number of open handles that are valid.
    open: usize,
    /// The process that has opened the first handle, for users.
    user: String,
    /// Number that valid handles have.
    generation: u64,
    free: Vec<AlignedBuffer>,
    /// Number of buffers that have been allocated.
    buffers: usize,
    is_ending: bool,
    device: Option<Device>,
}

/// Where the source is. Neither: a worker that did not respond has lost it.
struct Place {
    source: Option<Box<FuseSource>>,
    attached: Option<SourceId>,
}

impl Shared {
    pub(super) fn new(file: PathBuf, backend: Backend, queue: Queue, source: FuseSource) -> Shared {
        Shared {
            file,
            state: Mutex::new(State {
                backend,
                phase: Phase::Idle,
                open: 0,
                user: String::new(),
                generation: 0,
                free: Vec::new(),
                buffers: 0,
                is_ending: false,
                device: None,
            }),
            changed: Condvar::new(),
            place: Mutex::new(Place {
                source: Some(Box::new(source)),
                attached: None,
            }),
            queue,
        }
    }

    pub(super) fn set_device(&self, device: Device) {
        self.state.lock().device = Some(device);
    }

    /// Returns the disk.
    pub(super) fn disk(&self) -> Arc<dyn Disk> {
        self.state.lock().backend.disk.clone()
    }

    /// Returns the number of open handles that are valid.
    pub(super) fn open_handles(&self) -> usize {
        self.state.lock().open
    }

    /// Opens a handle, for the first of which the disk is put to use. Returns the handle's number.
    pub(super) fn open(&self, user: String) -> Result<u64, Errno> {
        let mut user = Some(user);
        loop {
            let mut place = self.place.lock();
            let mut state = self.state.lock();
            if state.is_ending {
                return Err(Errno::ENODEV);
            }
            match state.phase {
                Phase::Attached => {
                    state.open += 1;
                    return Ok(state.generation);
                }
                Phase::Held => {
                    drop(place);
                    self.changed.wait(&mut state);
                }
                Phase::Idle => {
                    let backend = state.backend.clone();
                    // (The disk may take long.)
                    drop(state);
                    attach(&mut place, &backend).map_err(|error| self.blame(&error))?;
                    let mut state = self.state.lock();
                    state.phase = Phase::Attached;
                    state.open = 1;
                    state.generation += 1;
                    state.user = user.take().unwrap_or_default();
                    (backend.watch)(Visit::Attached, &state.user);
                    return Ok(state.generation);
                }
            }
        }
    }

    fn blame(&self, error: &DiskError) -> Errno {
        tracing::warn!("{}: cannot be opened: {error}", self.file.display());
        match error {
            DiskError::Unusable { .. } => Errno::EBUSY,
            DiskError::Io { .. } | DiskError::Refused(_) => Errno::EIO,
        }
    }

    /// Closes a handle. After the last one, the disk is no longer in use.
    pub(super) fn close(&self, handle: u64) {
        let mut place = self.place.lock();
        let mut state = self.state.lock();
        if handle != state.generation || state.open == 0 {
            return;
        }
        state.open -= 1;
        if state.open == 0 {
            self.let_go(&mut place, state);
        }
    }

    /// Makes all handles invalid, and detaches from the disk.
    fn let_go(&self, place: &mut Place, mut state: MutexGuard<'_, State>) {
        state.open = 0;
        state.generation += 1;
        // (A held file has been detached.)
        if state.phase == Phase::Attached {
            state.phase = Phase::Idle;
            let backend = state.backend.clone();
            let user = std::mem::take(&mut state.user);
            drop(state);
            self.detach(place, &backend);
            (backend.watch)(Visit::Detached, &user);
        }
        if let Some(source) = &place.source {
            source.fail_waiting(libc::EIO);
        }
    }

    /// Waits for the requests in flight, and ceases to use the disk.
    fn detach(&self, place: &mut Place, backend: &Backend) {
        if let Some(id) = place.attached.take() {
            let source = backend.workers[0].detach(id).into_any().downcast();
            place.source = Some(source.expect("only sources of files are attached"));
            if let Err(error) = backend.disk.deactivate() {
                tracing::error!("{}: {error}", self.file.display());
            }
        }
    }

    /// Invalidates all handles, because the disk's virtual machine attaches or detaches.
    pub(super) fn disconnect(&self) {
        let mut place = self.place.lock();
        let state = self.state.lock();
        if state.phase == Phase::Attached {
            tracing::info!(
                "{}: programs must open the file again, because the virtual machine has left",
                self.file.display()
            );
            self.let_go(&mut place, state);
        }
    }

    /// Detaches from the disk until [`Shared::go_on`]. Requests wait. The error is for the user;
    /// after an error, requests continue.
    pub(super) fn hold(&self, deadline: Instant) -> Result<(), String> {
        let busy = || format!("requests for {} do not end", self.file.display());
        let mut place = self.place.try_lock_until(deadline).ok_or_else(busy)?;
        let mut state = self.state.lock();
        if state.phase == Phase::Attached {
            self.queue.set_paused(true);
            while self.queue.in_flight() > 0 {
                let waited = self.changed.wait_until(&mut state, deadline);
                if waited.timed_out() && self.queue.in_flight() > 0 {
                    self.queue.set_paused(false);
                    return Err(busy());
                }
            }
        }
        let was = std::mem::replace(&mut state.phase, Phase::Held);
        let backend = state.backend.clone();
        drop(state);
        if was == Phase::Attached {
            self.detach(&mut place, &backend);
        }
        Ok(())
    }

    /// Ends [`Shared::hold`]. With `other`, this disk replaces the previous one.
    pub(super) fn go_on(&self, other: Option<Backend>) {
        let mut place = self.place.lock();
        let mut state = self.state.lock();
        if let Some(other) = other {
            state.backend = other;
        }
        if state.phase != Phase::Held {
            return;
        }
        let backend = state.backend.clone();
        let is_open = state.open > 0;
        drop(state);
        self.queue.set_paused(false);
        let attached = is_open.then(|| attach(&mut place, &backend));
        let mut state = self.state.lock();
        state.phase = Phase::Idle;
        match attached {
            Some(Ok(())) => state.phase = Phase::Attached,
            Some(Err(error)) => {
                self.blame(&error);
                self.let_go(&mut place, state);
            }
            None => {}
        }
        self.changed.notify_all();
    }

    /// Returns a buffer, for which the caller may have to wait until a task ends. `None`: the
    /// session ends.
    pub(super) fn buffer(&self) -> Option<AlignedBuffer> {
        let mut state = self.state.lock();
        loop {
            if state.is_ending {
                return None;
            }
            if let Some(buffer) = state.free.pop() {
                return Some(buffer);
            }
            if state.buffers < CAPACITY
                && let Ok(buffer) = AlignedBuffer::try_new(MAX_LEN)
            {
                state.buffers += 1;
                return Some(buffer);
            }
            if state.buffers == 0 {
                // No memory is left, and no task will return any.
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    /// Passes a task of a handle to the disk.
    pub(super) fn submit(&self, handle: u64, task: Task) {
        let state = self.state.lock();
        let is_valid = handle == state.generation && state.open > 0;
        let refused = match is_valid {
            true => self.queue.push(task).err(),
            false => Some(Box::new(task)),
        };
        drop(state);
        if let Some(task) = refused {
            task.then.fail(Errno::EIO);
            self.recycle(task.buffer);
        }
    }

    /// Continues with a task whose request the disk has completed.
    pub(super) fn completed(&self, task: Task, errno: i32) {
        match task.completed(errno) {
            Progress::Done(buffer) => self.recycle(buffer),
            Progress::Next(task) => {
                // (Only valid handles have tasks, unless they have just become invalid.)
                let state = self.state.lock();
                let refused = match state.open > 0 {
                    true => self.queue.push(task).err(),
                    false => Some(Box::new(task)),
                };
                self.changed.notify_all();
                drop(state);
                if let Some(task) = refused {
                    task.then.fail(Errno::EIO);
                    self.recycle(task.buffer);
                }
            }
        }
    }

    fn recycle(&self, buffer: AlignedBuffer) {
        let mut state = self.state.lock();
        state.free.push(buffer);
        if state.is_ending {
            end_session(&mut state);
        }
        self.changed.notify_all();
    }

    /// Begins to end the session: it ends when no task is left. New requests fail.
    pub(super) fn begin_end(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        end_session(&mut state);
        self.changed.notify_all();
    }

    pub(super) fn is_ending(&self) -> bool {
        self.state.lock().is_ending
    }

    /// Waits until the session must end.
    pub(super) fn wait_for_end(&self) {
        let mut state = self.state.lock();
        while !state.is_ending {
            self.changed.wait(&mut state);
        }
    }

    /// Ends everything after the session thread has ended. The mount has ended afterwards.
    pub(super) fn end(&self) {
        let mut place = self.place.lock();
        let state = self.state.lock();
        self.let_go(&mut place, state);
        // (The reply thread ends with the source.)
        drop(place.source.take());
        drop(self.state.lock().device.take());
    }
}

/// Ends the session if no task is left.
fn end_session(state: &mut State) {
    if state.free.len() == state.buffers
        && let Some(device) = state.device.take()
    {
        device.end();
    }
}

/// Puts the disk to use, and attaches the source to its first worker.
fn attach(place: &mut Place, backend: &Backend) -> Result<(), DiskError> {
    let failed = |problem: String| DiskError::Refused(problem);
    let Some(source) = place.source.take() else {
        return Err(failed(
            "a worker that did not respond has lost its requests".into(),
        ));
    };
    if let Err(error) = backend.disk.activate() {
        place.source = Some(source);
        return Err(error);
    }
    match backend.workers[0].attach(source) {
        Ok(id) => {
            place.attached = Some(id);
            Ok(())
        }
        Err(error) => {
            if let Err(error) = backend.disk.deactivate() {
                tracing::error!("fuse: {error}");
            }
            Err(failed(fathom_units::cause(error)))
        }
    }
}
