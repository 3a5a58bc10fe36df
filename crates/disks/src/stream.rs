//! Streams, which shorten a disk's backing chain: backing images are copied into the top image, or
//! images in the middle of the chain are merged into an image below.

use super::shared_disk::SharedDisk;
use super::unanswered;
use fathom_control::RequestError;
use fathom_files::gate;
use fathom_formats::served::{ChainImage, ImageDisk, SideViewKind};
use fathom_formats::{Format, resolve};
use fathom_jobs::stream::{self, Below, Terms};
use fathom_jobs::{Following, Name, Phase, Source, Tell, commit};
use fathom_metrics::{Events, Happened, JobKind, StartingJob, StreamInfo};
use fathom_requests::new_identity;
use fathom_stack::{Description, check_raw, name_from, open_below};
use fathom_units::{cause, redacted};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time in which a stream must release images that respond.
const END: Duration = Duration::from_secs(30);

/// The backing image that the top image has after the stream.
#[derive(Clone, Debug)]
pub enum Base {
    Nothing,
    /// The image at this depth of the disk's own chain.
    Own {
        depth: usize,
        image: ChainImage,
    },
    /// Another image. Without a format, the image must be raw, and must not look like another
    /// format.
    Other {
        path: PathBuf,
        format: Option<Format>,
    },
}

impl Base {
    fn path(&self) -> Option<&PathBuf> {
        match self {
            Base::Nothing => None,
            Base::Own { image, .. } => Some(&image.path),
            Base::Other { path, .. } => Some(path),
        }
    }

    /// Opens the new backing image of the disk that `image` describes. May block. The error is for
    /// the user.
    fn open(&self, image: &Description) -> Result<Below, String> {
        let named = |path: &Path, format: Format| {
            let own = image.location.path().ok_or("its image is not a file")?;
            named(own, path, format)
        };
        Ok(match self {
            Base::Nothing => Below::Nothing,
            Base::Own { depth, image } => Below::Own {
                depth: *depth,
                name: named(&image.path, image.format)?,
            },
            Base::Other { path, format } => {
                let name = named(path, format.unwrap_or(Format::Raw))?;
                let opened = open_below(image, &name.name, *format);
                Below::Other {
                    disk: opened.map_err(|error| error.to_string())?,
                    name,
                }
            }
        })
    }
}

/// Returns the name by which the image at `above` refers to its backing image at `path`. The error
/// is for the user.
fn named(above: &Path, path: &Path, format: Format) -> Result<Name, String> {
    // (Names are relative to the directory of `above`; if `above` is a symbolic link, to the
    // directory of the link.)
    let dir = above.parent().filter(|dir| *dir != Path::new(""));
    let dir = gate::real_path(dir.unwrap_or(Path::new(".")));
    let dir = dir.map_err(|error| format!("cannot find its directory: {}", cause(error)))?;
    let above = dir.join(above.file_name().unwrap_or_default());
    let name = name_from(&above, path)?.into_bytes();
    // (The backing image will be opened by this name.)
    let found = resolve(&above, &name).map_err(|error| error.to_string())?;
    let is = |path: &Path| gate::real_path(path).ok();
    match is(&found).is_some_and(|found| is(path) == Some(found)) {
        true => Ok(Name { name, format }),
        false => Err(format!(
            "{}: not the file that the image would open as {}",
            path.display(),
            found.display()
        )),
    }
}

/// Images in the middle of a chain, which are merged into an image below them.
#[derive(Clone, Debug)]
pub struct Middle {
    /// Depth of the first image that is merged: 1 or more.
    pub top: usize,
    /// Depth of the image into which the images are merged.
    pub base: usize,
    /// The images of the chain, from the disk's top image down to `base`.
    pub images: Vec<ChainImage>,
}

impl Middle {
    fn path(&self, depth: usize) -> &PathBuf {
        &self.images[depth].path
    }
}

/// The kind of a stream.
#[derive(Clone, Debug)]
pub enum What {
    /// Data of the backing images above the base is copied into the top image.
    Up(Base),
    /// Images in the middle of the chain are merged into an image below them.
    Down(Middle),
}

/// A stream that begins once the disk has the options for it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Identity of the job.
    id: String,
    pub what: What,
    pub rate: Option<u64>,
}

impl Plan {
    pub fn new(what: What, rate: Option<u64>) -> Plan {
        let id = new_identity();
        Plan { id, what, rate }
    }

    /// Returns the job, which does not run yet.
    pub fn job(&self) -> StartingJob {
        let kind = match self.what {
            What::Up(_) => JobKind::Stream,
            What::Down(_) => JobKind::Commit,
        };
        StartingJob {
            kind,
            id: self.id.clone(),
            target: self.base().map(|path| shown(path)),
            speed: self.rate,
        }
    }

    /// Returns the option that the disk needs for the stream.
    pub fn side_view(&self) -> SideViewKind {
        match &self.what {
            What::Up(_) => SideViewKind::CopyOnRead,
            What::Down(Middle { top, base, .. }) => SideViewKind::Between {
                top: *top,
                base: *base,
            },
        }
    }

    fn base(&self) -> Option<&PathBuf> {
        match &self.what {
            What::Up(base) => base.path(),
            What::Down(middle) => Some(middle.path(middle.base)),
        }
    }

    fn top(&self) -> Option<&PathBuf> {
        match &self.what {
            What::Up(_) => None,
            What::Down(middle) => Some(middle.path(middle.top)),
        }
    }
}

/// Disk and images of a new stream.
pub struct Order {
    pub disk: String,
    /// The options with which the disk's image was opened.
    pub description: Description,
    pub source: Source,
    pub image: Arc<ImageDisk>,
    pub plan: Plan,
    pub shared: Arc<SharedDisk>,
    pub events: Events,
}

/// Called at the end of the job.
type Over = Box<dyn FnOnce() + Send>;

/// A stream that has begun, and may have ended.
#[derive(Clone)]
pub struct Running {
    id: String,
    pub following: Following,
    plan: Arc<Plan>,
    /// The images that the job reads and writes, for the user.
    images: Arc<str>,
    since: Instant,
}

impl Order {
    /// Begins the stream. `over` is called at its end. May block. The error is for the user.
    pub fn begin(self, over: Over) -> Result<Running, String> {
        let (disk, events) = (self.disk.clone(), self.events.clone());
        let tell = move |phase: Phase, problem: Option<&str>| {
            match problem {
                Some(problem) => tracing::warn!("disk '{disk}': stream: {problem}"),
                None => tracing::info!("disk '{disk}': stream is {}", phase.name()),
            }
            events.tell(Happened::Streamed {
                disk: disk.clone(),
                phase: phase.name().to_owned(),
                problem: problem.map(str::to_owned),
            });
        };
        let images = self.image.images();
        let images = match &self.plan.what {
            What::Up(_) => &images[..],
            What::Down(Middle { top, base, .. }) => &images[*top..=*base],
        };
        let images = unanswered::span(images).into();
        let (plan, shared) = (Arc::new(self.plan.clone()), self.shared.clone());
        let following = match &plan.what {
            What::Up(base) => self.bring_up(base, Arc::new(tell), over),
            What::Down(middle) => self.bring_down(middle, Arc::new(tell), over),
        }?;
        let leaving = following.clone();
        shared.set_followers_leave(Box::new(move || leaving.leave()));
        Ok(Running {
            id: plan.id.clone(),
            following,
            plan,
            images,
            since: Instant::now(),
        })
    }

    fn bring_up(self, base: &Base, tell: Tell, over: Over) -> Result<Following, String> {
        let below = base.open(&self.description)?;
        self.check_name(0, below.name())?;
        let terms = Terms {
            rate: self.plan.rate,
            below,
        };
        stream::start(self.source, self.image, terms, tell, over)
    }

    fn bring_down(self, middle: &Middle, tell: Tell, over: Over) -> Result<Following, String> {
        let (above, image) = (middle.top - 1, &middle.images[middle.base]);
        let below = named(middle.path(above), &image.path, image.format)?;
        self.check_name(above, Some(&below))?;
        if image.format == Format::Raw {
            // A file that an image calls raw is not written to if the file looks like another
            // format.
            check_raw(&image.path).map_err(|error| error.to_string())?;
        }
        let terms = commit::Terms {
            rate: self.plan.rate,
            below,
        };
        commit::start(self.source, self.image, terms, tell, over)
    }

    fn check_name(&self, depth: usize, name: Option<&Name>) -> Result<(), String> {
        let checked = self.image.check_backing(depth, name.map(Name::backing));
        checked.map_err(|error| error.to_string())
    }
}

/// An image, for the user.
fn shown(image: &Path) -> String {
    redacted(&image.display().to_string()).into_owned()
}

impl Running {
    pub fn info(&self) -> StreamInfo {
        let status = self.following.status();
        StreamInfo {
            id: self.id.clone(),
            base: self.plan.base().map(|path| shown(path)),
            top: self.plan.top().map(|path| shown(path)),
            phase: status.phase.name().into(),
            copied: status.copied,
            left: status.left,
            speed: self.following.rate(),
            seconds: self.since.elapsed().as_secs(),
            problem: status.problem,
        }
    }

    /// Ends the stream. Returns its final state, or an error for the user if its images do not
    /// respond. May block.
    pub fn end(&self) -> Result<StreamInfo, RequestError> {
        match self.following.end_unless_stuck(Instant::now() + END) {
            true => Ok(self.info()),
            false => Err(unanswered::error(&self.images)),
        }
    }
}
