//! Jobs that change a disk's backing chain.

use super::Served;
use crate::mirror::{Commit, Order, Running};
use crate::stream::{self, Base, Middle, Plan, What};
use fathom_formats::Format;
use fathom_formats::served::ChainImage;
use fathom_host::options::DiskOptions;
use fathom_jobs::mirror::Terms;
use fathom_jobs::{Following, Phase};
use fathom_metrics::StreamInfo;
use fathom_requests::{CommitOrder, StreamOrder, new_identity};
use fathom_spec::{DiskSpec, check_path};
use fathom_stack::KeyRing;
use fathom_storage::Location;
use fathom_units::{Size, cause};
use std::fs;
use std::path::{Path, PathBuf};

impl Served {
    /// Whether the disk has the options for a job that changes its chain.
    pub fn is_worked_on(&self) -> bool {
        self.options.disk.side_view.is_some()
    }

    /// Plans a commit of the disk into a backing image. The error is for the user.
    pub fn commit(&self, order: &CommitOrder, has_nbd: bool) -> Result<Commit, String> {
        check_path(&order.base)?;
        let images = self.images();
        let Some(depth) = depth_of(&images, &order.base)? else {
            return Err(not_below(&images, &order.base));
        };
        let (target, own) = (&images[depth], &images[0]);
        same_size(target, own)?;
        let spec = self.spec();
        let spec = DiskSpec {
            allow_dirs: dirs_of(&images[depth..], &spec.allow_dirs),
            ..(spec.clone()).on(Location::file(&target.path), Some(target.format))
        };
        Ok(Commit {
            id: new_identity(),
            depth,
            image: target.clone(),
            terms: Terms {
                rate: order.speed,
                brakes: order.active,
            },
            target: DiskOptions::of(spec, has_nbd)?,
        })
    }

    /// Returns the keys of the disk's encrypted images.
    pub fn keys(&self) -> &KeyRing {
        &self.options.disk.keys
    }

    /// Returns what is needed to begin a planned commit. The disk has the options for the commit.
    pub fn order_to_commit(&self, commit: Commit) -> Result<Order, String> {
        let above = self.stack.image.clone();
        let images = self.images();
        check_still(&images, commit.depth, &commit.image)?;
        { images[..commit.depth].iter() }.try_for_each(refuse_snapshots)?;
        Ok(Order {
            id: commit.id,
            disk: self.options.name.clone(),
            source: self.source(),
            terms: commit.terms,
            target: commit.target,
            above: Some((
                above.ok_or("the disk has no chain of images")?,
                commit.depth,
            )),
            shared: self.shared.clone(),
            events: self.events.clone(),
        })
    }

    /// Plans a stream. The error is for the user.
    pub fn plan_stream(&self, order: &StreamOrder) -> Result<Plan, String> {
        let images = self.images();
        let has_tables = |image: &&ChainImage| image.format.has_tables();
        if images.first().filter(has_tables).is_none() {
            let format = images.first().map_or(Format::Raw, |image| image.format);
            return Err(format!("a {format} image has no backing image"));
        }
        if let Some(top) = &order.top {
            let middle = middle_of(images, top, order.base.as_deref())?;
            return Ok(Plan::new(What::Down(middle), order.speed));
        }
        let base = match &order.base {
            None if images.len() == 1 => return Err("the disk's image has no backing image".into()),
            None => Base::Nothing,
            Some(path) => {
                check_path(path)?;
                base_of(&images, path, order.format)?
            }
        };
        Ok(Plan::new(What::Up(base), order.speed))
    }

    /// Returns what is needed to begin a planned stream. The disk has the options for the stream.
    pub fn order_to_stream(&self, plan: Plan) -> Result<stream::Order, String> {
        let (image, images) = (self.stack.image.clone(), self.images());
        match &plan.what {
            What::Up(base) => {
                if let Base::Own { depth, image } = base {
                    check_still(&images, *depth, image)?;
                }
                { images.first().into_iter() }.try_for_each(refuse_snapshots)?;
            }
            What::Down(middle) => {
                { middle.images.iter().enumerate() }
                    .try_for_each(|(depth, image)| check_still(&images, depth, image))?;
                { images[middle.top..middle.base].iter() }.try_for_each(refuse_snapshots)?;
            }
        }
        Ok(stream::Order {
            disk: self.options.name.clone(),
            description: self.options.disk.clone(),
            source: self.source(),
            image: image.ok_or("the disk has no chain of images")?,
            plan,
            shared: self.shared.clone(),
            events: self.events.clone(),
        })
    }

    pub fn set_stream(&mut self, stream: stream::Running) {
        self.stream = Some(stream);
    }

    pub fn stream(&self) -> Option<&stream::Running> {
        self.stream.as_ref()
    }

    /// Forgets the stream, which has ended, and whose final state has been reported.
    pub fn forget_stream(&mut self) {
        self.stream = None;
    }

    /// Returns the jobs that follow the disk: its mirror and its stream.
    pub(super) fn following(&self) -> impl Iterator<Item = &Following> {
        let mirror = self.mirror.iter().map(|running| &running.mirror.following);
        mirror.chain(self.stream.iter().map(|running| &running.following))
    }

    /// Sets the reason why the disk has not got its former options back after a job.
    pub fn set_unsettled(&mut self, problem: String) {
        self.unsettled = Some(problem);
    }

    /// Takes over an ended stream and a failed mirror of the disk that this disk replaces, to
    /// report their final states. Takes over nothing if the disks have different images.
    pub fn keep_jobs(&mut self, before: &mut Served) {
        if self.options.disk.location != before.options.disk.location {
            return;
        }
        let is_over = |running: &mut stream::Running| running.following.is_over();
        self.stream = before.stream.take_if(is_over);
        let has_failed = |mirror: &mut Running| mirror.has_failed();
        self.mirror = before.mirror.take_if(has_failed);
    }

    /// Returns the progress of the disk's stream.
    ///
    /// A complete stream is still `finishing` until the disk has got its former options back, and
    /// has released the images that left the chain.
    pub fn stream_info(&self) -> Option<StreamInfo> {
        let mut info = self.stream.as_ref()?.info();
        let holds = self.is_worked_on();
        if info.phase == Phase::Done.name() && holds {
            info.phase = "finishing".into();
            info.problem = self.unsettled.clone();
        }
        Some(info)
    }

    /// Whether the disk serves the bytes at this location as they are.
    pub fn is_raw(&self, location: &Location) -> bool {
        let disk = &self.options.disk;
        disk.location == *location && disk.format.unwrap_or(Format::Raw) == Format::Raw
    }

    fn images(&self) -> Vec<ChainImage> {
        let image = self.stack.image.as_ref();
        image.map_or_else(Vec::new, |image| image.images())
    }
}

/// Fails if `image` is no longer at this depth: the disk was opened again after the job was
/// planned.
fn check_still(images: &[ChainImage], depth: usize, image: &ChainImage) -> Result<(), String> {
    match images.get(depth).is_some_and(|now| now.is_same(image)) {
        true => Ok(()),
        false => Err("the image is no longer in the same chain".into()),
    }
}

/// Fails if the image has internal snapshots, whose contents another backing image would change.
/// (The number of snapshots is current, because the disk was opened just now.)
fn refuse_snapshots(image: &ChainImage) -> Result<(), String> {
    match image.snapshots {
        0 => Ok(()),
        count => Err(format!(
            "{} has {count} internal snapshots, which depend on its backing image; delete them \
             first ('fathom img snapshot')",
            image.path.display()
        )),
    }
}

/// Fails if the images have different sizes: the data of `above` must fill `below` exactly.
fn same_size(below: &ChainImage, above: &ChainImage) -> Result<(), String> {
    match below.size == above.size {
        true => Ok(()),
        false => Err(format!(
            "{} has {}, {} has {}; both images must have the same size",
            below.path.display(),
            Size(below.size),
            above.path.display(),
            Size(above.size)
        )),
    }
}

/// Finds the images that are merged from `top` into `base`.
fn middle_of(
    mut images: Vec<ChainImage>,
    top: &Path,
    base: Option<&Path>,
) -> Result<Middle, String> {
    let base = base.ok_or("no base is given: name the image into which to merge")?;
    [top, base].into_iter().try_for_each(check_path)?;
    let find = |path| depth_of(&images, path)?.ok_or_else(|| not_below(&images, path));
    let (top, base) = (find(top)?, find(base)?);
    if top >= base {
        let (top, base) = (images[top].path.display(), images[base].path.display());
        return Err(format!("{base} is not a backing image of {top}"));
    }
    same_size(&images[base], &images[top])?;
    images.truncate(base + 1);
    Ok(Middle { top, base, images })
}

/// Finds the new backing image at `path`: one of the top image's backing images, or another image.
fn base_of(images: &[ChainImage], path: &Path, format: Option<Format>) -> Result<Base, String> {
    match depth_of(images, path)? {
        Some(1) => Err(format!("{} is already its backing image", path.display())),
        Some(depth) => Ok(Base::Own {
            depth,
            image: images[depth].clone(),
        }),
        None => Ok(Base::Other {
            path: real(path)?,
            format,
        }),
    }
}

fn real(path: &Path) -> Result<PathBuf, String> {
    fs::canonicalize(path).map_err(|error| {
        format!(
            "{}: cannot find the image: {}",
            path.display(),
            cause(error)
        )
    })
}

/// Returns the depth of the backing image that is the file at `path`, if there is such an image.
fn depth_of(images: &[ChainImage], path: &Path) -> Result<Option<usize>, String> {
    let wanted = real(path)?;
    for (depth, image) in images.iter().enumerate().skip(1) {
        if real(&image.path)? == wanted {
            return Ok(Some(depth));
        }
    }
    Ok(None)
}

fn not_below(images: &[ChainImage], path: &Path) -> String {
    let below: Vec<_> = { images.iter().skip(1) }
        .map(|image| image.path.display().to_string())
        .collect();
    match below.is_empty() {
        true => "the disk's image has no backing image".into(),
        false => format!(
            "{} is not a backing image of the disk; its backing images are {}",
            path.display(),
            below.join(", ")
        ),
    }
}

/// Returns the directories in which the first of these images may find the others, besides its own
/// directory.
fn dirs_of(images: &[ChainImage], allowed: &[PathBuf]) -> Vec<PathBuf> {
    let own = images.first().and_then(|image| image.path.parent());
    let mut dirs = allowed.to_vec();
    for dir in images.iter().filter_map(|image| image.path.parent()) {
        if own != Some(dir) && !dirs.iter().any(|known| known == dir) {
            dirs.push(dir.to_owned());
        }
    }
    dirs.retain(|dir| images.len() > 1 && own != Some(dir));
    dirs
}
