//! Operations on disks that may take long, each on a thread of its own, and the events that report
//! their ends.

use super::backup::{Order, Running};
use super::disk::{Common, Served};
use super::freeze::{Users, Waiting, on_a_thread};
use super::mirror;
use super::snapshots;
use super::stream;
use fathom_control::{Condition, RequestError};
use fathom_core::{DiskError, Resize, ThreadKind, WorkerHandle, thread_starts};
use fathom_exports::nbd;
use fathom_formats::served::ImageDisk;
use fathom_host::Error;
use fathom_host::mailbox::Post;
use fathom_host::options::DiskOptions;
use fathom_jobs::Source;
use fathom_metrics::{BackupInfo, BitmapInfo, MirrorInfo, SnapshotInfo, StreamInfo};
use fathom_requests::{BitmapOrder, Responder};
use fathom_sockets::Listener;
use fathom_spec::DiskSpec;
use fathom_stack::BitmapStatus;
use fathom_trace::Summary;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// A disk that must be removed as soon as the disk is not in use.
pub struct Leaving {
    pub name: String,
    pub responder: Responder,
    pub until: Instant,
    pub only_if: Condition,
}

/// A job that begins once the disk has the options for the job.
pub enum Next {
    Commit(Box<mirror::Commit>),
    Stream(stream::Plan),
}

/// The state of a disk whose job has ended, and that must get its former options back.
pub struct Over {
    pub look_at: Instant,
    pause: Duration,
}

/// Pause after the first failed attempt, which doubles each time: guests and clients wait during
/// each attempt.
const AGAIN: Duration = Duration::from_secs(30);

impl Default for Over {
    fn default() -> Over {
        Over {
            look_at: Instant::now(),
            pause: AGAIN,
        }
    }
}

impl Over {
    /// Schedules the next attempt.
    pub fn try_again(&mut self) {
        self.look_at = Instant::now() + self.pause;
        self.pause = self.pause.saturating_mul(2);
    }
}

/// An event that another thread reports. The string is the name of the disk; an error is the reason
/// of a failure.
pub enum Event {
    /// The disk has been opened.
    Opened(String, Result<Box<Served>, Error>),
    /// The disk has been closed, with its last statistics.
    Closed(String, Box<Summary>),
    /// The disk has been resized.
    Resized(String, Result<u64, DiskError>),
    /// Another program may have resized the disk's file.
    SizeSeen(String),
    /// The disk has been frozen.
    Frozen(String, Box<Result<Waiting, String>>),
    /// The disk has been thawed.
    Thawed(String),
    /// The disk has been replaced, or continues as before.
    Remade(String, Result<Box<Served>, String>),
    /// A backup has begun.
    BackupBegun(String, Box<Result<Running, String>>),
    /// A backup has ended.
    BackupEnded(String, Box<BackupInfo>),
    /// A mirror has begun.
    MirrorBegun(String, Box<Result<mirror::Running, String>>),
    /// A mirror has ended, or has not ended yet.
    MirrorEnded(String, Box<Result<MirrorInfo, RequestError>>),
    /// A stream has begun.
    StreamBegun(String, Box<Result<stream::Running, String>>),
    /// A job that changes the disk's chain has ended by itself, with or without success.
    JobOver(String),
    /// A stream has been ended by a request, or continues.
    StreamEnded(String, Box<Result<StreamInfo, RequestError>>),
    /// The disk has these options with its new image, and waits for the decision whether it keeps
    /// that image.
    Switched(String, Box<DiskSpec>, SyncSender<bool>),
    /// The disk's dirty bitmaps have been listed or changed.
    BitmapsDone(String, Result<Vec<BitmapInfo>, String>),
    /// The internal snapshots of the disk's image have been listed.
    SnapshotsListed(String, Result<Vec<SnapshotInfo>, String>),
}

/// Timeout for requests in flight when a disk becomes smaller.
const SETTLE: Duration = Duration::from_secs(30);

/// A timeout that is never reached.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Opens a disk.
pub fn open(
    options: DiskOptions,
    listener: Option<Listener>,
    common: Common,
    post: Post<Event>,
) -> io::Result<()> {
    on_a_thread("add a disk", move || {
        let name = options.name.clone();
        let opened = Served::open(options, listener, common);
        post.send(Event::Opened(name, opened.map(Box::new)));
    })
}

/// Closes a disk that is not in use, without waiting for its threads.
pub fn give_up(mut disk: Served) {
    let builder = thread::Builder::new().name("give a disk up".into());
    // (If no thread can be started, the disk is dropped here.)
    let _ = builder.spawn(move || {
        thread_starts(ThreadKind::General);
        disk.begin_stop();
        disk.end(Instant::now() + FOR_EVER);
    });
}

/// A disk to close, and its NBD clients that are leaving.
pub type ToClose = (Served, Option<nbd::Leaving>);

/// Starts a thread that closes the disk that the caller sends to the thread.
///
/// The thread disconnects the front-end and clients, waits for requests in flight without a
/// timeout, and closes the disk.
pub fn close(post: Post<Event>) -> io::Result<SyncSender<ToClose>> {
    let (send, receive) = sync_channel(1);
    on_a_thread("remove a disk", move || {
        let Ok((disk, clients)) = receive.recv() else {
            return;
        };
        let mut closing = Closing { disk, clients };
        let name = closing.disk.name().to_owned();
        while !closing.wait(Instant::now() + FOR_EVER) {}
        let summary = Box::new(closing.disk.summary());
        drop(closing);
        post.send(Event::Closed(name, summary));
    })?;
    Ok(send)
}

/// Reports when another program may have resized the disk's file.
pub fn watch_size(disk: &Served, post: Post<Event>) {
    let name = disk.name().to_owned();
    disk.watch_size(Arc::new(move || post.send(Event::SizeSeen(name.clone()))));
}

/// Resizes a disk.
pub fn resize(disk: &Served, size: Option<u64>, shrink: bool, post: Post<Event>) -> io::Result<()> {
    let name = disk.name().to_owned();
    let (disk, workers) = disk.resizing();
    on_a_thread("resize a disk", move || {
        let resized = disk.resize(&Resize {
            size,
            shrink,
            settle: &|| settle(&workers),
        });
        post.send(Event::Resized(name, resized));
    })
}

/// Begins a backup.
pub fn begin_backup(order: Order, post: Post<Event>) -> io::Result<()> {
    on_a_thread("begin a backup", move || {
        let name = order.disk.clone();
        post.send(Event::BackupBegun(name, Box::new(order.begin())));
    })
}

/// Ends a backup.
pub fn end_backup(name: String, running: Running, post: Post<Event>) -> io::Result<()> {
    on_a_thread("end a backup", move || {
        let ended = running.end();
        post.send(Event::BackupEnded(name, Box::new(ended)));
    })
}

/// Begins a mirror.
pub fn begin_mirror(order: mirror::Order, over: Post<Event>, post: Post<Event>) -> io::Result<()> {
    on_a_thread("begin a mirror", move || {
        let name = order.disk.clone();
        let of = name.clone();
        let begun = order.begin(Box::new(move || over.send(Event::JobOver(of))));
        post.send(Event::MirrorBegun(name, Box::new(begun)));
    })
}

/// Ends a mirror. `users`: guests and clients, which wait for the end of a mirror that is ready.
pub fn end_mirror(
    name: String,
    running: mirror::Running,
    users: Option<Users>,
    post: Post<Event>,
) -> io::Result<()> {
    on_a_thread("end a mirror", move || {
        let ended = running.end(users);
        post.send(Event::MirrorEnded(name, Box::new(ended)));
    })
}

/// Begins a stream.
pub fn begin_stream(order: stream::Order, over: Post<Event>, post: Post<Event>) -> io::Result<()> {
    on_a_thread("begin a stream", move || {
        let name = order.disk.clone();
        let of = name.clone();
        let begun = order.begin(Box::new(move || over.send(Event::JobOver(of))));
        post.send(Event::StreamBegun(name, Box::new(begun)));
    })
}

/// Ends a stream.
pub fn end_stream(name: String, running: stream::Running, post: Post<Event>) -> io::Result<()> {
    on_a_thread("end a stream", move || {
        let ended = running.end();
        post.send(Event::StreamEnded(name, Box::new(ended)));
    })
}

/// Lists or changes a disk's bitmaps, on a thread of its own.
pub fn order_bitmaps(disk: &Served, order: BitmapOrder, post: Post<Event>) -> io::Result<()> {
    let name = disk.name().to_owned();
    let (bitmaps, size) = disk.bitmaps();
    let source = disk.source();
    let shared = disk.shared().clone();
    on_a_thread("see to bitmaps", move || {
        let changes_image = bitmaps.are_in_image() && order != BitmapOrder::List;
        bitmaps.prepare(size);
        let work = || see_to_bitmaps(&source, size, order);
        let list = match changes_image {
            true => { shared.with_image(work) }.unwrap_or_else(|error| Err(error.to_string())),
            false => work(),
        };
        let list = list.map(|all| all.into_iter().map(BitmapInfo::from).collect());
        post.send(Event::BitmapsDone(name, list));
    })
}

fn see_to_bitmaps(
    source: &Source,
    size: u64,
    order: BitmapOrder,
) -> Result<Vec<BitmapStatus>, String> {
    let Source { tap, workers, .. } = source;
    let bitmaps = tap.bitmaps();
    match order {
        BitmapOrder::List => Ok(()),
        BitmapOrder::Add {
            bitmap,
            granularity,
        } => tap.add_bitmap(&bitmap, size, granularity, workers),
        BitmapOrder::Remove { bitmap } => bitmaps.remove(&bitmap, size),
        BitmapOrder::Advance { bitmap, to } => bitmaps.advance(&bitmap, to, size),
        BitmapOrder::Clear { bitmap } => tap.clear_bitmap(&bitmap, size, workers),
        BitmapOrder::Rename { bitmap, to } => bitmaps.rename(&bitmap, &to, size),
        BitmapOrder::Merge { bitmap, from } => bitmaps.merge(&bitmap, &from, size),
    }?;
    bitmaps.list(size)
}

/// Lists the internal snapshots of a disk's image.
pub fn list_snapshots(name: String, image: Arc<ImageDisk>, post: Post<Event>) -> io::Result<()> {
    on_a_thread("list snapshots", move || {
        post.send(Event::SnapshotsListed(name, snapshots::all_of(&image)));
    })
}

/// Waits for the end of the requests that these workers have in flight.
fn settle(workers: &[WorkerHandle]) -> Result<(), DiskError> {
    let deadline = Instant::now() + SETTLE;
    let settling: Vec<_> = workers.iter().map(WorkerHandle::begin_settle).collect();
    match settling.into_iter().all(|settling| settling.wait(deadline)) {
        true => Ok(()),
        false => {
            let problem = "requests in flight do not end; the disk keeps its size";
            Err(DiskError::Refused(problem.into()))
        }
    }
}

struct Closing {
    disk: Served,
    clients: Option<nbd::Leaving>,
}

impl Closing {
    /// Waits until front-end, clients, jobs and workers have ended. False: not all of them have
    /// ended at `deadline`.
    fn wait(&mut self, deadline: Instant) -> bool {
        self.disk.begin_stop();
        match self.disk.end(deadline) {
            None => return false,
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!("disk '{}': {error}", self.disk.name()),
        }
        let are_gone = |clients: &nbd::Leaving| clients.wait(deadline);
        self.clients.as_ref().is_none_or(are_gone) && self.disk.end_workers(deadline)
    }
}
