//! Disks that come, go and change while others are served: each on a thread of its own, since
//! opening, draining and resizing one may take long.

use super::backup::{Order, Running};
use super::disk::{Common, Served};
use super::freeze::{Users, Waiting, on_a_thread};
use super::mirror;
use super::snapshots;
use super::stream;
use crate::error::Error;
use crate::mailbox::Post;
use crate::options::DiskOptions;
use crate::orders::BitmapOrder;
use crate::reply::Responder;
use fathom_control::{Condition, RequestError};
use fathom_core::{DiskError, Resize, ThreadKind, WorkerHandle, thread_starts};
use fathom_exports::Listener;
use fathom_exports::nbd;
use fathom_formats::served::ImageDisk;
use fathom_jobs::Source;
use fathom_metrics::{BackupInfo, BitmapInfo, MirrorInfo, SnapshotInfo, StreamInfo};
use fathom_spec::DiskSpec;
use fathom_stack::BitmapStatus;
use fathom_trace::Summary;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// A disk that is to be removed, but was in use.
pub struct Leaving {
    pub name: String,
    pub responder: Responder,
    pub until: Instant,
    pub only_if: Condition,
}

/// What is to be done with a disk once it has the options for it.
pub enum Next {
    Commit(Box<mirror::Commit>),
    Stream(stream::Plan),
}

/// A disk whose job is over, and that is to get its options back.
pub struct Over {
    pub look_at: Instant,
    pause: Duration,
}

/// After the first attempt, for each of which users wait; then for twice as long each time.
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
    /// It is tried now.
    pub fn try_again(&mut self) {
        self.look_at = Instant::now() + self.pause;
        self.pause = self.pause.saturating_mul(2);
    }
}

/// What other threads have to say.
pub enum Event {
    /// The disk of that name is there, or will not be.
    Opened(String, Result<Box<Served>, Error>),
    /// The disk of that name is no more; with what it has done.
    Closed(String, Box<Summary>),
    /// The disk of that name has this size, or has failed to get another one.
    Resized(String, Result<u64, DiskError>),
    /// Somebody else may have given the disk of that name another size.
    SizeSeen(String),
    /// The disk of that name stands still, or cannot, for this reason.
    Frozen(String, Box<Result<Waiting, String>>),
    /// It goes on.
    Thawed(String),
    /// The disk of that name is served by another one now, or is as it was, for this reason.
    Remade(String, Result<Box<Served>, String>),
    /// A backup of the disk of that name has begun, or cannot, for this reason.
    BackupBegun(String, Box<Result<Running, String>>),
    /// It has ended.
    BackupEnded(String, Box<BackupInfo>),
    /// A mirror of the disk of that name has begun, or cannot, for this reason.
    MirrorBegun(String, Box<Result<mirror::Running, String>>),
    /// It has ended, or has not yet, for this reason.
    MirrorEnded(String, Box<Result<MirrorInfo, RequestError>>),
    /// The image of the disk of that name begins to make its own what is below, or cannot, for this reason.
    StreamBegun(String, Box<Result<stream::Running, String>>),
    /// A job of the disk of that name is over, in whatever way it has ended.
    JobOver(String),
    /// That was waited for; or it goes on, for this reason.
    StreamEnded(String, Box<Result<StreamInfo, RequestError>>),
    /// The disk of that name has another image now, and these options; it is waited for whether it is to stay so.
    Switched(String, Box<DiskSpec>, SyncSender<bool>),
    /// What was to be done with the bitmaps of the disk of that name is done; or not, for this reason.
    BitmapsDone(String, Result<Vec<BitmapInfo>, String>),
    /// The internal snapshots of the image of the disk of that name.
    SnapshotsListed(String, Result<Vec<SnapshotInfo>, String>),
}

/// How long a disk that is to be smaller waits for what is in flight.
const SETTLE: Duration = Duration::from_secs(30);

/// Longer than anybody waits.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Opens a disk, which uses some of what disks share.
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

/// Lets go of a disk that nobody uses: its threads end, which others do not wait for.
pub fn give_up(mut disk: Served) {
    let builder = thread::Builder::new().name("give a disk up".into());
    // (Where no thread can be made, it is dropped here.)
    let _ = builder.spawn(move || {
        thread_starts(ThreadKind::General);
        disk.begin_stop();
        disk.end(Instant::now() + FOR_EVER);
    });
}

/// A disk to close, and its NBD clients.
pub type ToClose = (Served, Option<nbd::Leaving>);

/// Makes ready for closing a disk, which it is sent then: it disconnects whoever uses the disk, lets
/// what is in flight end, and closes it, however long that takes.
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

/// Hears when others may have given the disk another size.
pub fn watch_size(disk: &Served, post: Post<Event>) {
    let name = disk.name().to_owned();
    disk.watch_size(Arc::new(move || post.send(Event::SizeSeen(name.clone()))));
}

/// Gives a disk another size.
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

/// Ends one.
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

/// Ends one. `users`: they wait for it, if it is ready.
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

/// Has an image begin to make its own what is below.
pub fn begin_stream(order: stream::Order, over: Post<Event>, post: Post<Event>) -> io::Result<()> {
    on_a_thread("begin a stream", move || {
        let name = order.disk.clone();
        let of = name.clone();
        let begun = order.begin(Box::new(move || over.send(Event::JobOver(of))));
        post.send(Event::StreamBegun(name, Box::new(begun)));
    })
}

/// Ends that.
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

/// Waits for the end of what the disk has of these workers.
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
    /// False: it is not over at `deadline`.
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
