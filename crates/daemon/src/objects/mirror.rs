//! A disk that is copied to another one while it is used, to take its place.

use super::freeze::Users;
use super::shared_disk::SharedDisk;
use super::unanswered;
use crate::identity::new_identity;
use crate::options::DiskOptions;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::{UsedFile, check_same};
use fathom_formats::Format;
use fathom_formats::served::{ChainImage, ImageDisk};
use fathom_jobs::Phase;
use fathom_jobs::Source;
use fathom_jobs::mirror::{Mirror, Target, Terms};
use fathom_metrics::MirrorInfo;
use fathom_metrics::{Events, Happened};
use fathom_stack::{check_raw, open_unserved};
use fathom_units::redacted;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Users wait for so long at most.
const HALT: Duration = Duration::from_secs(5);
/// Time in which a mirror must let go of two disks that answer.
const END: Duration = Duration::from_secs(30);

/// A disk that is to be brought into an image below it.
pub struct Commit {
    /// Of that.
    pub depth: usize,
    pub image: ChainImage,
    pub terms: Terms,
    /// The disk as it would be with that image.
    pub target: DiskOptions,
}

/// What it takes to begin.
pub struct Order {
    pub disk: String,
    pub source: Source,
    pub terms: Terms,
    /// The disk as it would be with the target.
    pub target: DiskOptions,
    /// The image that has the target below it, and the target's depth in that chain.
    pub above: Option<(Arc<ImageDisk>, usize)>,
    pub shared: Arc<SharedDisk>,
    pub events: Events,
}

/// One that has begun, and is over or not.
#[derive(Clone)]
pub struct Running {
    id: String,
    pub mirror: Mirror,
    target: Arc<DiskOptions>,
    terms: Terms,
    /// The files of the target that are written to.
    files: Arc<[UsedFile]>,
    /// The images that the mirror reads and writes, for the user.
    images: Arc<str>,
    since: Instant,
}

impl Order {
    /// `over` hears of its end. May block. The error is for the user: both disks are as they were.
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
                let images = redacted(&self.target.disk.location.to_string()).into_owned();
                (Target::Other(opened), files, images)
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
            id: new_identity(),
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
    /// What somebody's image calls raw is not written to if it looks like something else.
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
    /// The disk as it would be with the target.
    pub fn target(&self) -> &DiskOptions {
        &self.target
    }

    /// Fails if one of the files that were opened `now` to take the disk's place is not the one that was copied to.
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

    /// What is left takes no longer than users can wait.
    pub fn is_ready(&self) -> bool {
        self.mirror.following.status().phase == Phase::Ready
    }

    pub fn info(&self) -> MirrorInfo {
        let status = self.mirror.following.status();
        let disk = &self.target.disk;
        MirrorInfo {
            id: self.id.clone(),
            target: redacted(&disk.location.to_string()).into_owned(),
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
    /// `users` is present unless the end is forced: the users wait, and the target becomes the disk as
    /// of that instant. When that fails the mirror stays as it is. May block. The error is for the user.
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

    /// Copies the rest while the users wait. After an error the mirror follows the disk as before.
    fn finish(&self, users: Users) -> Result<(), String> {
        let finished = match self.is_ready() {
            false => Err("the mirror is no longer ready".to_owned()),
            true => self.finish_ready(users),
        };
        match finished {
            // The target may have become complete, or useless, in the meantime.
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
            // Before the users resume: the mirror would end with the first change of theirs.
            self.mirror.go_on();
        }
        waiting.thaw();
        finished
    }
}
