//! A disk whose image makes its own what is below it, or of which some images go into one below.

use super::shared_disk::SharedDisk;
use super::unanswered;
use fathom_control::RequestError;
use fathom_files::gate;
use fathom_formats::served::{Beside, ChainImage, ImageDisk};
use fathom_formats::{Format, resolve};
use fathom_jobs::stream::{self, Below, Terms};
use fathom_jobs::{Following, Name, Phase, Source, Tell, commit};
use fathom_metrics::StreamInfo;
use fathom_metrics::{Events, Happened};
use fathom_requests::new_identity;
use fathom_stack::{Description, check_raw, name_from, open_below};
use fathom_units::{cause, redacted};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time in which a stream must let go of images that answer.
const END: Duration = Duration::from_secs(30);

/// What is to be below the image.
#[derive(Clone, Debug)]
pub enum Base {
    Nothing,
    /// Of its own chain, at that depth.
    Own {
        depth: usize,
        image: ChainImage,
    },
    /// Raw if nothing else is said, and if it does not look like something else.
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

    /// May block. The error is for the user.
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

/// What the image in the file at `above` calls the one at `path`. The error is for the user.
fn named(above: &Path, path: &Path, format: Format) -> Result<Name, String> {
    // (Names are seen from the directory that it is in, even if it is a link there.)
    let dir = above.parent().filter(|dir| *dir != Path::new(""));
    let dir = gate::real_path(dir.unwrap_or(Path::new(".")));
    let dir = dir.map_err(|error| format!("cannot find its directory: {}", cause(error)))?;
    let above = dir.join(above.file_name().unwrap_or_default());
    let name = name_from(&above, path)?.into_bytes();
    // (It is going to be opened by that.)
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

/// Images in the middle of a chain, which go into one below.
#[derive(Clone, Debug)]
pub struct Middle {
    /// The depth of the first of them, 1 or more, and of the one that they go into.
    pub top: usize,
    pub base: usize,
    /// All of the chain, down to that.
    pub images: Vec<ChainImage>,
}

impl Middle {
    fn path(&self, depth: usize) -> &PathBuf {
        &self.images[depth].path
    }
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum What {
    /// What is above the base comes up.
    Up(Base),
    Down(Middle),
}

/// What is to be done once the disk has the options for it.
#[derive(Clone, Debug)]
pub struct Plan {
    pub what: What,
    pub rate: Option<u64>,
}

impl Plan {
    /// What options.
    pub fn beside(&self) -> Beside {
        match &self.what {
            What::Up(_) => Beside::CopyOnRead,
            What::Down(Middle { top, base, .. }) => Beside::Between {
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

/// What it takes to begin.
pub struct Order {
    pub disk: String,
    /// As its image is opened.
    pub description: Description,
    pub source: Source,
    pub image: Arc<ImageDisk>,
    pub plan: Plan,
    pub shared: Arc<SharedDisk>,
    pub events: Events,
}

/// Hears that it is over.
type Over = Box<dyn FnOnce() + Send>;

/// One that has begun, and is over or not.
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
    /// `over` hears of its end. May block. The error is for the user.
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
            id: new_identity(),
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
            // What somebody's image calls raw is not written to if it looks like something else.
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

impl Running {
    pub fn info(&self) -> StreamInfo {
        let status = self.following.status();
        let shown = |image: &PathBuf| redacted(&image.display().to_string()).into_owned();
        StreamInfo {
            id: self.id.clone(),
            base: self.plan.base().map(shown),
            top: self.plan.top().map(shown),
            phase: status.phase.name().into(),
            copied: status.copied,
            left: status.left,
            speed: self.following.rate(),
            seconds: self.since.elapsed().as_secs(),
            problem: status.problem,
        }
    }

    /// Ends the job. Returns its final state, or an error for the user if its images do not answer. May block.
    pub fn end(&self) -> Result<StreamInfo, RequestError> {
        match self.following.end_unless_stuck(Instant::now() + END) {
            true => Ok(self.info()),
            false => Err(unanswered::error(&self.images)),
        }
    }
}
