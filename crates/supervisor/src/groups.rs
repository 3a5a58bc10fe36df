//! Control groups of tenants: the kernel's bookkeeping of what each uses, by which it may be limited.
//!
//! ```text
//! BASE                         the server's group
//! ├── supervisor               its process itself, where version 2 wants that
//! └── fathom-tenants-NUMBER    locked by the server as long as it lives
//!     ├── tenant-NAME          as long as the tenant has a process
//!     └── ...
//! ```
//!
//! That is so in each hierarchy that has a controller which is needed. Without limits there are none.

mod files;
mod hierarchy;

use fathom_host::allowance::Allowance;
use fathom_host::handover::GroupsState;
use fathom_metrics::TenantLimits;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use hierarchy::{Base, Controller, Version};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

const PREFIX: &str = "fathom-tenants-";
/// Of a tenant that nobody can name so.
const PROBE: &str = ":probe";
/// Whoever has ended may be in a group for another instant.
const ATTEMPTS: u32 = 20;
const INSTANT: Duration = Duration::from_millis(1);
/// The kernel does not kill such processes, whatever memory they use.
const NEVER_KILLED: &str = "-1000";
const HARDLY_EVER: &str = "-999";

/// All of this server's.
#[derive(Default)]
pub struct Groups(Vec<Place>);

/// Those in one hierarchy.
struct Place {
    base: Base,
    controllers: Vec<Controller>,
    dir: PathBuf,
    /// Who can lock it knows that the server is gone.
    lock: File,
    /// It is this process's to remove.
    is_own: bool,
}

impl Groups {
    /// As they are needed for limits like these, each of which can be had. The error is for the user.
    pub fn new(limits: &[Allowance]) -> Result<Groups, String> {
        let mut groups = Groups::default();
        groups.extend(limits)?;
        Ok(groups)
    }

    /// Likewise, beside those that are there.
    pub fn extend(&mut self, limits: &[Allowance]) -> Result<(), String> {
        for controller in [Controller::Memory, Controller::Cpu, Controller::Tasks] {
            if limits.iter().any(|limits| is_limited(limits, controller)) {
                let added = self.add(controller);
                added.map_err(|problem| format!("{}: {problem}", controller.key()))?;
            }
        }
        let probe = |limits| self.enter(PROBE, limits, None).map(drop);
        limits.iter().try_for_each(probe)
    }

    fn add(&mut self, controller: Controller) -> Result<(), String> {
        let has = |place: &Place| place.controllers.contains(&controller);
        if self.0.iter().any(has) {
            return Ok(());
        }
        let base = Base::find(controller)?;
        base.enable(controller)?;
        let index = match self.0.iter().position(|place| place.base == base) {
            Some(index) => index,
            None => {
                remove_leftovers(&base.dir);
                let place = Place::new(&base).map_err(|error| base.problem(&error))?;
                self.0.push(place);
                self.0.len() - 1
            }
        };
        let place = &mut self.0[index];
        if base.version == Version::Two {
            let enabled = hierarchy::enable(&place.dir, controller);
            enabled.map_err(|error| base.problem(&error))?;
        }
        place.controllers.push(controller);
        Ok(())
    }

    /// The group for a tenant's next process; `present`: that of another one, where there is one. None:
    /// nothing is limited.
    pub fn enter(
        &self,
        tenant: &str,
        limits: &Allowance,
        present: Option<Arc<Group>>,
    ) -> Result<Option<Arc<Group>>, String> {
        if *limits == Allowance::default() && present.is_none() {
            return Ok(None);
        }
        // (It may be from when there were others.)
        let present = present.filter(|group| group.0.len() == self.0.len());
        let group = present.unwrap_or_else(|| Arc::new(self.group(tenant)));
        for part in &group.0 {
            let made = hierarchy::make(&part.dir);
            made.map_err(|error| format!("{}: {}", part.dir.display(), cause(error)))?;
            for controller in &part.controllers {
                let set = files::limit(part.version, &part.dir, *controller, limits);
                set.map_err(|problem| format!("{}: cannot set {problem}", controller.key()))?;
            }
        }
        Ok(Some(group))
    }

    fn group(&self, tenant: &str) -> Group {
        let parts = self.0.iter().map(|place| Part {
            version: place.base.version,
            controllers: place.controllers.clone(),
            dir: place.dir.join(format!("tenant-{tenant}")),
        });
        Group(parts.collect())
    }

    /// That of a tenant's process which is there; None: it has none.
    pub fn adopt_group(&self, tenant: &str) -> Option<Arc<Group>> {
        let mut group = self.group(tenant);
        group.0.retain(|part| part.dir.is_dir());
        (!group.0.is_empty()).then(|| Arc::new(group))
    }

    /// For a successor of this supervisor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<Vec<GroupsState>> {
        let places = self.0.iter().map(|place| {
            Ok(GroupsState {
                version: match place.base.version {
                    Version::One => 1,
                    Version::Two => 2,
                },
                controllers: place
                    .controllers
                    .iter()
                    .map(|one| one.name().into())
                    .collect(),
                dir: place.dir.clone(),
                lock: files.add(&place.lock)?,
            })
        });
        places.collect()
    }

    /// A predecessor's, until [`Groups::own`].
    pub fn adopt(state: Vec<GroupsState>, files: &mut Descriptors) -> Result<Groups, String> {
        let places = state.into_iter().map(|state| {
            let all = [Controller::Memory, Controller::Cpu, Controller::Tasks];
            let has = |one: &Controller| state.controllers.iter().any(|name| name == one.name());
            let dir = state.dir.parent().unwrap_or(Path::new("/")).to_owned();
            let version = match state.version {
                1 => Version::One,
                _ => Version::Two,
            };
            Ok(Place {
                base: Base { version, dir },
                controllers: all.into_iter().filter(has).collect(),
                dir: state.dir,
                lock: files.take(state.lock)?.into(),
                is_own: false,
            })
        });
        places.collect::<Result<_, String>>().map(Groups)
    }

    pub fn own(&mut self) {
        self.0.iter_mut().for_each(|place| place.is_own = true);
    }
}

impl Place {
    fn new(base: &Base) -> io::Result<Place> {
        let pid = std::process::id();
        for n in 0.. {
            let name = match n {
                0 => format!("{PREFIX}{pid}"),
                n => format!("{PREFIX}{pid}-{n}"),
            };
            let dir = base.dir.join(name);
            match fs::create_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            // Somebody who removes leftovers may have been faster.
            if let Some(lock) = lock(&dir) {
                return Ok(Place {
                    base: base.clone(),
                    controllers: Vec::new(),
                    dir,
                    lock,
                    is_own: true,
                });
            }
        }
        Err(io::Error::other("too many groups of other servers"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_own {
            remove_all(&self.dir);
        }
    }
}

/// None: somebody else has it, or it is gone.
fn lock(dir: &Path) -> Option<File> {
    let file = File::open(dir).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    let (here, there) = (file.metadata().ok()?, fs::metadata(dir).ok()?);
    (here.ino() == there.ino()).then_some(file)
}

/// Groups of servers that were killed. Theirs is what they have the lock of.
fn remove_leftovers(base: &Path) {
    for dir in groups_in(base) {
        let name = dir.file_name().unwrap_or_default();
        if name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
            && let Some(_lock) = lock(&dir)
        {
            tracing::debug!("{}: left by a server that has ended", dir.display());
            remove_all(&dir);
        }
    }
}

/// A server's, with those in it in which nobody is.
fn remove_all(dir: &Path) {
    groups_in(dir).iter().for_each(|group| remove(group));
    remove(dir);
}

fn groups_in(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.map(|entry| entry.path()).collect()
}

fn remove(dir: &Path) {
    for attempt in 1..=ATTEMPTS {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempt < ATTEMPTS => {
                sleep(INSTANT);
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // The next server tries again.
                return tracing::debug!(
                    "{}: cannot remove the control group: {}",
                    dir.display(),
                    cause(error)
                );
            }
            _ => return,
        }
    }
}

fn is_limited(limits: &Allowance, controller: Controller) -> bool {
    match controller {
        Controller::Memory => limits.memory.is_some(),
        Controller::Cpu => limits.cpu.is_some(),
        Controller::Tasks => limits.tasks.is_some(),
    }
}

/// That of one tenant, in each hierarchy. It is gone when this is, if nobody is in it.
pub struct Group(Vec<Part>);

struct Part {
    version: Version,
    controllers: Vec<Controller>,
    dir: PathBuf,
}

impl Group {
    /// Put a process there, before it does anything.
    pub fn put(&self, pid: u32) -> io::Result<()> {
        for part in &self.0 {
            files::put(&part.dir, pid)?;
        }
        // Else its limit of memory would only have it wait.
        let score = format!("/proc/{pid}/oom_score_adj");
        match fs::read_to_string(&score)?.trim() == NEVER_KILLED {
            true => fs::write(score, HARDLY_EVER),
            false => Ok(()),
        }
    }

    /// What the kernel says of it.
    pub fn limits(&self) -> TenantLimits {
        let mut limits = TenantLimits::default();
        for part in &self.0 {
            for controller in &part.controllers {
                files::read(part.version, &part.dir, *controller, &mut limits);
            }
        }
        limits
    }

    /// How often the kernel has ended somebody there for want of memory.
    pub fn memory_kills(&self) -> u64 {
        let has_memory = |part: &&Part| part.controllers.contains(&Controller::Memory);
        let parts = self.0.iter().filter(has_memory);
        let kills = parts.map(|part| files::memory_kills(part.version, &part.dir));
        kills.sum()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.0.iter().for_each(|part| remove(&part.dir));
    }
}
