//! Replaces a disk that is in use: by the same image with other options, or by another image with
//! the same contents. The virtual machine and the clients stay connected, and wait for some
//! milliseconds.

use super::changes::Event;
use super::disk::{Common, Served};
use super::freeze::on_a_thread;
use super::marks::Marks;
use super::mirror::Running;
use super::nbd::let_disconnect;
use super::shared_disk::SharedDisk;
use super::snapshots::SnapshotWork;
use fathom_core::Parts;
use fathom_exports::vhost_user::{Arriving, Frozen, arrival};
use fathom_exports::{FuseExport, NbdServer, VhostUser};
use fathom_files::{UsedFile, check_same};
use fathom_formats::Format;
use fathom_host::mailbox::Post;
use fathom_host::options::DiskOptions;
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

/// Timeout for requests in flight.
const HALT: Duration = Duration::from_secs(5);

/// The new options of a disk, and the parts of the present disk that the new one takes over.
pub struct Remake {
    pub options: DiskOptions,
    pub common: Common,
    /// Parts of the present disk that keep their state.
    pub parts: Parts,
    /// The files that the present disk has open.
    pub files: Vec<UsedFile>,
    pub export: Option<Arc<VhostUser>>,
    /// The server of its NBD clients, if it has any.
    pub clients: Option<Arc<NbdServer>>,
    /// The mounted file of the disk, if it has one.
    pub file: Option<Arc<FuseExport>>,
    pub also: Also,
    /// The present disk, as its front-end, clients and jobs share it.
    pub before: Arc<SharedDisk>,
    /// The image of the present disk.
    pub old: MarkedImage,
    /// The file of the disk's definition, if it has one.
    pub definition: Option<PathBuf>,
}

/// An operation in addition to the replacement.
pub enum Also {
    Nothing,
    /// The disk gets another image.
    Switch(Switch),
    /// Internal snapshots are changed while the image is closed.
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
    /// The disk's dirty bitmaps and its size, if the bitmaps may not stay with the old image.
    pub bitmaps: Option<(Arc<Bitmaps>, u64)>,
}

/// Another image, which has the disk's contents while guests and clients wait.
pub enum Other {
    /// The target of a mirror.
    Mirror(Running),
    /// A new overlay.
    Layer(Layer),
}

/// A new overlay of the present image.
pub struct Layer {
    pub path: PathBuf,
    pub below: PathBuf,
    pub format: Format,
    pub size: u64,
    /// Keys of the new image, which is encrypted if there are any.
    pub keys: KeyRing,
}

impl Switch {
    /// Creates the overlay. The error is for the user.
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

    /// Fails if the disk that was opened is not the other image. `before`: the files of the disk
    /// that it replaces.
    fn check(&self, disk: &Served, mut before: Vec<UsedFile>) -> Result<(), String> {
        let size = match &self.to {
            Other::Mirror(running) => {
                running.check_target(&disk.used_files())?;
                running.mirror.size()
            }
            Other::Layer(layer) => {
                // (The other images are one deeper in the new chain.)
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

    /// Fails if dirty bitmaps would stay behind: the next incremental backup would not find them.
    fn check_bitmaps(&self) -> Result<(), String> {
        let Some((bitmaps, size)) = &self.bitmaps else {
            return Ok(());
        };
        // (A disk that cannot have bitmaps leaves none.)
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

    /// Prepares the other image, before guests and clients wait.
    fn begin_finish(&self) {
        if let Other::Mirror(running) = &self.to {
            running.mirror.begin_finish();
        }
    }

    /// Completes the other image while guests and clients wait.
    fn finish(&self, deadline: Instant) -> Result<(), String> {
        match &self.to {
            Other::Mirror(running) => running.mirror.finish(deadline),
            Other::Layer(_) => Ok(()),
        }
    }

    /// Gives up the other image: a mirror continues, and a new overlay is removed.
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
    /// Begins on a thread of its own, which reports the result.
    pub fn begin(self, post: Post<Event>) -> io::Result<()> {
        on_a_thread("change a disk", move || {
            let name = self.options.name.clone();
            let remade = self.run(&post);
            post.send(Event::Remade(name, remade.map(Box::new)));
        })
    }

    /// Replaces the disk. After an error, which is for the user, the disk continues as before.
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
        // (Until here, no file was changed, and no client was disturbed.)
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
        // (Clients find the new disk by this name.)
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
                if let Some(file) = &self.file {
                    disk.let_file_disconnect(file);
                    file.go_on(Some(disk.backend()));
                }
                Ok(disk)
            }
            Err(problem) => {
                // (The old disk has then released the image.)
                disk.begin_stop();
                disk.end(Instant::now() + HALT);
                // (Otherwise the mirror would try to finish, and the front-end would wait for the
                // mirror.)
                if let Some(Other::Mirror(running)) = switch.map(|switch| &switch.to) {
                    running.mirror.go_on();
                }
                let going_on = frozen.map(Frozen::go_on);
                going_on.into_iter().for_each(|export| export.wait(HALT));
                if let Some((server, export)) = clients {
                    server.go_on_export(export.name(), None);
                }
                if let Some(file) = &self.file {
                    file.go_on(None);
                }
                Err(problem)
            }
        }
    }

    /// Stops the users, and gives the new disk the state of the present disk. The new disk does not
    /// serve the users yet.
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
            // (Before the front-end stops: clients depend on it.)
            server.hold_export(name, deadline)?;
        }
        if let Some(file) = &self.file {
            file.hold(deadline)?;
        }
        // (The front-end releases the disk when everything is copied.)
        let switch = self.also.switch();
        switch.into_iter().for_each(Switch::begin_finish);
        let halting = frozen.map(|frozen| frozen.begin_halt());
        let bases = halting.map(|halting| halting.wait(deadline)).transpose()?;
        let left = self.parts.final_state()?;
        if let Some(switch) = switch {
            switch.finish(deadline)?;
            // (The state of the storage belongs to the old image.)
            left.take(PART);
        }
        disk.restore(&left)?;
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

    /// Checks that writes that are acknowledged and not durable survive a kill of the server: the
    /// front-end must keep their state.
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

    /// Marks the old image of a switch, and waits for the decision whether the disk keeps the new
    /// image. The controller writes the definition durably before it decides. The new image is
    /// unchanged until then. Returns why the old image could not be marked.
    fn decide(&self, disk: &Served, post: &Post<Event>) -> Result<Option<String>, String> {
        if self.also.switch().is_none() {
            return Ok(None);
        }
        // (A disk that is not in use would otherwise fail too late.)
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
            // The process is about to end, and its successor has the stored definition.
            Err(_) => {
                if self.definition.is_none() {
                    // (No definition was stored.)
                    marks.take_back();
                }
                loop {
                    thread::park();
                }
            }
        }
    }
}
