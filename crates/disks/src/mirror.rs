//! Mirrors: a disk in use is copied to another disk or image, which may replace it.

use super::freeze::Users;
use super::shared_disk::SharedDisk;
use super::unanswered;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::{UsedFile, check_same};
use fathom_formats::Format;
use fathom_formats::served::{ChainImage, ImageDisk};
use fathom_host::options::DiskOptions;
use fathom_jobs::Phase;
use fathom_jobs::Source;
use fathom_jobs::mirror::{Mirror, Target, Terms};
use fathom_metrics::{Events, Happened, JobKind, MirrorInfo, StartingJob};
use fathom_stack::{check_raw, open_unserved};
use fathom_units::redacted;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time for which guests and clients wait at the end of a mirror.
const HALT: Duration = Duration::from_secs(5);
/// Time in which a mirror must release two disks that respond.
const END: Duration = Duration::from_secs(30);

/// A commit: a mirror to a backing image.
pub struct Commit {
    /// Identity of the job.
    pub id: String,
    /// Depth of the backing image in the chain.
    pub depth: usize,
    pub image: ChainImage,
    pub terms: Terms,
    /// Options of the disk with that image.
    pub target: DiskOptions,
}

impl Commit {
    /// Returns the job, which does not run yet.
    pub fn job(&self) -> StartingJob {
        starting(&self.id, &self.target, self.terms)
    }
}

/// Source, target and limits of a new mirror.
pub struct Order {
    /// Identity of the job.
    pub id: String,
    pub disk: String,
    pub source: Source,
    pub terms: Terms,
    /// Options of the disk with the target.
    pub target: DiskOptions,
    /// For a commit: the top image, and the target's depth in its chain.
    pub above: Option<(Arc<ImageDisk>, usize)>,
    pub shared: Arc<SharedDisk>,
    pub events: Events,
}

/// A mirror that has begun, and may have ended.
#[derive(Clone)]
pub struct Running {
    id: String,
    pub mirror: Mirror,
    target: Arc<DiskOptions>,
    terms: Terms,
    /// The files of the target.
    files: Arc<[UsedFile]>,
    /// The images that the mirror reads and writes, for the user.
    images: Arc<str>,
    since: Instant,
}

fn starting(id: &str, target: &DiskOptions, terms: Terms) -> StartingJob {
    StartingJob {
        kind: JobKind::Mirror,
        id: id.to_owned(),
        target: Some(shown(target)),
        speed: terms.rate,
    }
}

/// The location of a target, for the user.
fn shown(target: &DiskOptions) -> String {
    redacted(&target.disk.location.to_string()).into_owned()
}

impl Order {
    /// Returns the job, which does not run yet.
    pub fn job(&self) -> StartingJob {
        starting(&self.id, &self.target, self.terms)
    }

    /// Begins the mirror. `over` is called at its end. May block. The error is for the user: both
    /// disks are unchanged.
    pub fn begin(self, over: Box<dyn FnOnce() + Send>) -> Result<Running, String> {
        let (target, files, images) = match self.above.clone() {
            Some((image, depth)) => {
                self.check_raw()?;
                let files = image.used_files(depth);
                let images = unanswered::span(&image.images()[..=depth]);
                (Target::Below(image), files, images)
            }
            None => {
                let opened = open_unserved(&self.target.disk);
                let opened = opened.map_err(|error| error.to_string())?;
                let files = opened.files.clone();
                (Target::Other(opened), files, shown(&self.target))
            }
        };
        let (disk, events) = (self.disk.clone(), self.events);
        let tell = move |phase: Phase, problem: Option<&str>| {
            match problem {
                Some(problem) => tracing::warn!("disk '{disk}': mirror: {problem}"),
                None => tracing::info!("disk '{disk}': mirror is {}", phase.name()),
            }
            events.tell(Happened::Mirrored {
                disk: disk.clone(),
                phase: phase.name().to_owned(),
                problem: problem.map(str::to_owned),
            });
        };
        let mirror = Mirror::start(self.source, target, self.terms, Arc::new(tell), over)?;
        let leaving = mirror.following.clone();
        self.shared
            .set_followers_leave(Box::new(move || leaving.leave()));
        Ok(Running {
            id: self.id,
            mirror,
            target: Arc::new(self.target),
            terms: self.terms,
            files: files.into(),
            images: images.into(),
            since: Instant::now(),
        })
    }
}

impl Order {
    /// Fails if a target that an image calls raw looks like another format.
    fn check_raw(&self) -> Result<(), String> {
        let disk = &self.target.disk;
        match (disk.format, disk.location.path()) {
            (None | Some(Format::Raw), Some(path)) => {
                check_raw(path).map_err(|error| error.to_string())
            }
            _ => Ok(()),
        }
    }
}

impl Running {
    /// Options of the disk with the target.
    pub fn target(&self) -> &DiskOptions {
        &self.target
    }

    /// Fails if one of the files that are opened `now` is not the file that the mirror has written.
    pub fn check_target(&self, now: &[UsedFile]) -> Result<(), String> {
        check_same(&self.files, now, 0)
            .map_err(|_| "its target was replaced by another file".into())
    }

    pub fn is_over(&self) -> bool {
        self.mirror.following.is_over()
    }

    pub fn has_failed(&self) -> bool {
        self.mirror.following.status().phase == Phase::Failed
    }

    /// Whether the rest can be copied while guests and clients wait.
    pub fn is_ready(&self) -> bool {
        self.mirror.following.status().phase == Phase::Ready
    }

    pub fn info(&self) -> MirrorInfo {
        let status = self.mirror.following.status();
        let disk = &self.target.disk;
        MirrorInfo {
            id: self.id.clone(),
            target: shown(&self.target),
            format: disk.format.unwrap_or(Format::Raw).name().into(),
            phase: status.phase.name().into(),
            copied: status.copied,
            left: status.left,
            speed: self.mirror.following.rate(),
            active: self.terms.brakes,
            seconds: self.since.elapsed().as_secs(),
            problem: status.problem,
        }
    }

    /// Ends the mirror. Returns its final state.
    ///
    /// `users` is present unless the end is forced: the users wait, and the target becomes the disk
    /// as of that instant. If that fails, the mirror continues. May block. The error is for the
    /// user.
    pub fn end(&self, users: Option<Users>) -> Result<MirrorInfo, RequestError> {
        if let Some(users) = users.filter(|_| !self.is_over()) {
            let finished = self.finish(users);
            finished.map_err(|problem| ErrorKind::Failed.because(problem))?;
        }
        let following = &self.mirror.following;
        match following.end_unless_stuck(Instant::now() + END) {
            true => Ok(self.info()),
            false => Err(unanswered::error(&self.images)),
        }
    }

    /// Copies the rest while the users wait. After an error, the mirror follows the disk as before.
    fn finish(&self, users: Users) -> Result<(), String> {
        let finished = match self.is_ready() {
            false => Err("the mirror is no longer ready".to_owned()),
            true => self.finish_ready(users),
        };
        match finished {
            // (The target may have become complete or unusable meanwhile.)
            Err(_) if self.is_over() => Ok(()),
            Err(problem) => Err(format!(
                "the mirror still follows the disk: {problem}; retry, or end it with --force, \
                 which leaves an incomplete target"
            )),
            Ok(()) => Ok(()),
        }
    }

    fn finish_ready(&self, users: Users) -> Result<(), String> {
        self.mirror.begin_finish();
        let waiting = users.freeze().inspect_err(|_| self.mirror.go_on())?;
        let finished = self.mirror.finish(Instant::now() + HALT);
        if finished.is_err() {
            // (Before guests and clients resume: their first change would end the mirror.)
            self.mirror.go_on();
        }
        waiting.thaw();
        finished
    }
}
