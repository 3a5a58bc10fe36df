//! A disk whose image makes its own what is below it.

use super::shared_disk::SharedDisk;
use crate::events::{Events, Happened};
use crate::info::StreamInfo;
use fathom_files::gate;
use fathom_formats::Format;
use fathom_formats::served::{ChainImage, ImageDisk};
use fathom_jobs::stream::{self, Below, Name, Terms};
use fathom_jobs::{Following, Phase, Source};
use fathom_stack::{Description, name_from, open_below};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So long it may take to let go of the images.
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
        let named = |path: &PathBuf, format: Format| -> Result<Name, String> {
            let own = image.location.path().ok_or("its image is not a file")?;
            // (Names are seen from the directory that it is in, even if it is a link there.)
            let dir = own.parent().filter(|dir| *dir != Path::new(""));
            let dir = gate::real_path(dir.unwrap_or(Path::new(".")));
            let dir = dir.map_err(|error| format!("its directory cannot be found: {error}"))?;
            let own = dir.join(own.file_name().unwrap_or_default());
            Ok(Name {
                name: name_from(&own, path)?.into_bytes(),
                format,
            })
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

/// What is to be done once the disk has the options for it.
#[derive(Clone, Debug)]
pub struct Plan {
    pub base: Base,
    pub rate: Option<u64>,
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

/// One that has begun, and is over or not.
#[derive(Clone)]
pub struct Running {
    pub following: Following,
    base: Option<PathBuf>,
    since: Instant,
}

impl Order {
    /// `over` hears of its end. May block. The error is for the user.
    pub fn begin(self, over: Box<dyn FnOnce() + Send>) -> Result<Running, String> {
        let below = self.plan.base.open(&self.description)?;
        let backing = below.name().map(Name::backing);
        let checked = self.image.check_backing(backing);
        checked.map_err(|error| error.to_string())?;
        let (disk, events) = (self.disk, self.events);
        let tell = move |phase: Phase, problem: Option<&str>| {
            match problem {
                Some(problem) => tracing::warn!("the stream of disk '{disk}': {problem}"),
                None => tracing::info!("the stream of disk '{disk}' is {}", phase.name()),
            }
            events.tell(Happened::Streamed {
                disk: disk.clone(),
                phase: phase.name().to_owned(),
                problem: problem.map(str::to_owned),
            });
        };
        let terms = Terms {
            rate: self.plan.rate,
            below,
        };
        let following = stream::start(self.source, self.image, terms, Box::new(tell), over)?;
        let leaving = following.clone();
        self.shared
            .set_followers_leave(Box::new(move || leaving.leave()));
        Ok(Running {
            following,
            base: self.plan.base.path().cloned(),
            since: Instant::now(),
        })
    }
}

impl Running {
    pub fn info(&self) -> StreamInfo {
        let status = self.following.status();
        StreamInfo {
            base: self.base.as_ref().map(|base| base.display().to_string()),
            phase: status.phase.name().into(),
            copied: status.copied,
            left: status.left,
            seconds: self.since.elapsed().as_secs(),
            problem: status.problem,
        }
    }

    /// Let it be: what has become of it. May block. The error is for the user: it has not let go of the images yet.
    pub fn end(&self) -> Result<StreamInfo, String> {
        match self.following.end(Instant::now() + END) {
            true => Ok(self.info()),
            false => Err("its images do not answer: it ends when they do".into()),
        }
    }
}
