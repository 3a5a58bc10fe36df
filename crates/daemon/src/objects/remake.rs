//! Another disk in the place of one that is served: the same image by other options, with the same
//! virtual machine and the same clients, who wait for some milliseconds; or the disk on another image that is the same.

use super::changes::Event;
use super::disk::{Common, Served};
use super::freeze::on_a_thread;
use super::marks::Marks;
use super::mirror::Running;
use super::nbd::let_disconnect;
use super::shared_disk::SharedDisk;
use super::snapshots::SnapshotWork;
use crate::mailbox::Post;
use crate::options::DiskOptions;
use fathom_core::Parts;
use fathom_exports::vhost_user::{Arriving, Frozen, arrival};
use fathom_exports::{NbdServer, VhostUser};
use fathom_files::{UsedFile, check_same};
use fathom_formats::Format;
use fathom_stack::{Bitmaps, KeyRing, MarkedImage, make_layer};
use fathom_storage::PART;
use fathom_units::{Size, cause};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

/// What is in flight has so long to end.
const HALT: Duration = Duration::from_secs(5);

/// What is needed for another disk, and whom it gets.
pub struct Remake {
    pub options: DiskOptions,
    pub common: Common,
    /// Of the one that there is.
    pub parts: Parts,
    /// The files that the disk before this one has open.
    pub files: Vec<UsedFile>,
    pub export: Option<Arc<VhostUser>>,
    /// Whose clients it has, if it has some.
    pub clients: Option<Arc<NbdServer>>,
    pub also: Also,
    /// Who uses the one that there is.
    pub before: Arc<SharedDisk>,
    /// The image of the one that there is.
    pub old: MarkedImage,
    /// The file of the disk's definition, if it has one.
    pub definition: Option<PathBuf>,
}

/// What is done besides.
pub enum Also {
    Nothing,
    /// It gets another image.
    Switch(Switch),
    /// While nobody uses the image.
    Snapshots(Arc<SnapshotWork>),
}

impl Also {
    pub fn switch(&self) -> Option<&Switch> {
        match self {
            Also::Switch(switch) => Some(switch),
            Also::Nothing | Also::Snapshots(_) => None,
        }
    }
}

/// A switch to another image.
pub struct Switch {
    pub to: Other,
    /// The disk's bitmaps and its size, if the bitmaps may not stay with the old image.
    pub bitmaps: Option<(Arc<Bitmaps>, u64)>,
}

/// Another image, which is the same as the disk's when its users wait.
pub enum Other {
    /// The target of a mirror.
    Mirror(Running),
    /// A new one.
    Layer(Layer),
}

/// A new image, to be made on top of the one that there is.
pub struct Layer {
    pub path: PathBuf,
    pub below: PathBuf,
    pub format: Format,
    pub size: u64,
    /// It is encrypted if there are some.
    pub keys: KeyRing,
}

impl Switch {
    /// It is there. The error is for the user.
    fn prepare(&self) -> Result<(), String> {
        match &self.to {
            Other::Mirror(_) => Ok(()),
            Other::Layer(Layer {
                path,
                below,
                format,
                size,
                keys,
            }) => make_layer(path, below, *format, *size, keys),
        }
    }

    /// Fails if the disk that was opened is not the other image. `before`: the files of the disk that it replaces.
    fn check(&self, disk: &Served, mut before: Vec<UsedFile>) -> Result<(), String> {
        let size = match &self.to {
            Other::Mirror(running) => {
                running.check_target(&disk.used_files())?;
                running.mirror.size()
            }
            Other::Layer(layer) => {
                // The images are one below the new one.
                before.iter_mut().for_each(|file| file.depth += 1);
                check_same(&before, &disk.used_files(), 1)?;
                layer.size
            }
        };
        match disk.size() == size {
            true => self.check_bitmaps(),
            false => Err(format!(
                "the other image has {}, not the disk's size",
                Size(disk.size())
            )),
        }
    }

    /// Refuses to leave dirty bitmaps behind: the next incremental backup would find none.
    fn check_bitmaps(&self) -> Result<(), String> {
        let Some((bitmaps, size)) = &self.bitmaps else {
            return Ok(());
        };
        // (A disk that can have no bitmaps leaves none.)
        let left = bitmaps.list(*size).unwrap_or_default();
        let left: Vec<_> = left.into_iter().map(|bitmap| bitmap.name).collect();
        match left.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "its dirty bitmaps ({}) would stay with the old image, and the next backup by \
                 them would have to be a full one; repeat with --leave-bitmaps, or remove them \
                 first ('fathom bitmap remove')",
                left.join(", ")
            )),
        }
    }

    /// Users will wait.
    fn begin_finish(&self) {
        if let Other::Mirror(running) = &self.to {
            running.mirror.begin_finish();
        }
    }

    /// Users wait: it is the same when this returns.
    fn finish(&self, deadline: Instant) -> Result<(), String> {
        match &self.to {
            Other::Mirror(running) => running.mirror.finish(deadline),
            Other::Layer(_) => Ok(()),
        }
    }

    /// It is not wanted after all.
    fn give_up(&self) {
        match &self.to {
            Other::Mirror(running) => running.mirror.go_on(),
            Other::Layer(layer) => {
                if let Err(error) = fs::remove_file(&layer.path) {
                    tracing::warn!(
                        "{}: cannot remove the unused file: {}",
                        layer.path.display(),
                        cause(error)
                    );
                }
            }
        }
    }
}

impl Remake {
    /// On a thread of its own, which tells what has become of it.
    pub fn begin(self, post: Post<Event>) -> io::Result<()> {
        on_a_thread("change a disk", move || {
            let name = self.options.name.clone();
            let remade = self.run(&post);
            post.send(Event::Remade(name, remade.map(Box::new)));
        })
    }

    /// On an error, which is for the user, all is as it was.
    fn run(self, post: &Post<Event>) -> Result<Served, String> {
        let switch = self.also.switch();
        switch.map_or(Ok(()), Switch::prepare)?;
        let served = self.serve(post);
        if served.is_err() {
            switch.into_iter().for_each(Switch::give_up);
        }
        served
    }

    fn serve(&self, post: &Post<Event>) -> Result<Served, String> {
        let opened = Served::open(self.options.clone(), None, self.common.clone());
        let mut disk = opened.map_err(|error| error.to_string())?;
        disk.succeed(&self.before);
        let switch = self.also.switch();
        // Until here nothing was changed in what was found by name, nor taken from users.
        match switch {
            Some(switch) => switch.check(&disk, self.files.clone())?,
            None => check_same(&self.files, &disk.used_files(), 0)?,
        }
        let export = self.export.as_ref().map(|export| export.freeze());
        let mut frozen = export.transpose()?;
        let moved = self.move_to(&mut disk, frozen.as_mut());
        let moved = moved.and_then(|arriving| {
            let unmarked = self.decide(&disk, post)?;
            disk.set_unmarked(unmarked);
            Ok(arriving)
        });
        // As a client sees it, who looks for the other one by this name.
        let clients = self.clients.as_ref().zip(disk.nbd_export());
        match moved {
            Ok(arriving) => {
                frozen.into_iter().for_each(Frozen::let_go);
                arriving.iter().for_each(Arriving::run);
                if let Some((server, export)) = clients {
                    let_disconnect(&disk, server);
                    let name = export.name().to_owned();
                    server.go_on_export(&name, Some(export));
                }
                Ok(disk)
            }
            Err(problem) => {
                // It has let go of the image then.
                disk.begin_stop();
                disk.end(Instant::now() + HALT);
                // (Which would go on with the rest, for which the front-end would wait.)
                if let Some(Other::Mirror(running)) = switch.map(|switch| &switch.to) {
                    running.mirror.go_on();
                }
                let going_on = frozen.map(Frozen::go_on);
                going_on.into_iter().for_each(|export| export.wait(HALT));
                if let Some((server, export)) = clients {
                    server.go_on_export(export.name(), None);
                }
                Err(problem)
            }
        }
    }

    /// Up to where it serves.
    fn move_to(
        &self,
        disk: &mut Served,
        mut frozen: Option<&mut Frozen>,
    ) -> Result<Option<Arriving>, String> {
        let state = frozen.as_mut().and_then(|frozen| {
            let files = std::mem::take(&mut frozen.descriptors);
            Some(arrival(frozen.state.take()?, files))
        });
        let (arriving, arrival) = state.unzip();
        disk.take(arrival).map_err(|error| error.to_string())?;
        arriving.as_ref().map_or(Ok(()), Arriving::wait)?;
        self.check_room(disk)?;
        let deadline = Instant::now() + HALT;
        if let Some((server, name)) = self.clients.as_ref().zip(disk.export_name()) {
            // Before the virtual machine lets go of it, on which clients depend.
            server.hold_export(name, deadline)?;
        }
        // (The front-end lets go of the disk when all is copied.)
        let switch = self.also.switch();
        switch.into_iter().for_each(Switch::begin_finish);
        let halting = frozen.map(|frozen| frozen.begin_halt());
        let bases = halting.map(|halting| halting.wait(deadline)).transpose()?;
        let left = self.parts.leave()?;
        if let Some(switch) = switch {
            switch.finish(deadline)?;
            // (That is the image's own.)
            left.take(PART);
        }
        disk.take_left(&left)?;
        if let (Also::Snapshots(work), Some(image)) = (&self.also, disk.qcow2_image()) {
            let (bitmaps, size) = disk.bitmaps();
            bitmaps.keep_through(size, || work.run(&image))?;
        }
        if let Some((arriving, bases)) = arriving.as_ref().zip(bases) {
            arriving.begin_to_activate(bases);
            arriving.wait()?;
        }
        Ok(arriving)
    }

    /// What a disk has told the guest to be done and not written yet survives its server's end only if the front-end
    /// keeps it.
    fn check_room(&self, disk: &Served) -> Result<(), String> {
        let keeps_nothing =
            |export: Option<&VhostUser>| export.is_some_and(|export| export.status().keeps_nothing);
        let (before, after) = (self.export.as_deref(), disk.export_shared());
        match keeps_nothing(after.as_deref()) && !keeps_nothing(before) {
            false => Ok(()),
            true => Err(
                "its virtual machine was started with an earlier server, which reserved too \
                 little memory for the saved state of an image of that format; restart the \
                 virtual machine first"
                    .into(),
            ),
        }
    }

    /// Marks the old image of a switch, and waits for whether users go on with the new one: whoever decides that has
    /// written it down by then. Nothing has been changed in the new image yet. Returns why the old image could not be
    /// marked.
    fn decide(&self, disk: &Served, post: &Post<Event>) -> Result<Option<String>, String> {
        if self.also.switch().is_none() {
            return Ok(None);
        }
        // (Where nobody has it yet, it would be found out too late that it cannot be used.)
        let _in_use = disk.try_to_use()?;
        let marks = Marks::set(&self.old, disk, self.definition.clone())?;
        let (decide, decision) = sync_channel(1);
        let name = self.options.name.clone();
        post.send(Event::Switched(name, self.options.spec.clone(), decide));
        match decision.recv() {
            Ok(true) => Ok(marks.finish()),
            Ok(false) => {
                marks.take_back();
                Err("the definition with the other image could not be stored".into())
            }
            // This process is about to end, and another one has what was noted.
            Err(_) => {
                if self.definition.is_none() {
                    // Nobody has noted anything.
                    marks.take_back();
                }
                loop {
                    thread::park();
                }
            }
        }
    }
}
