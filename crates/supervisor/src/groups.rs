//! Control groups (cgroups) of tenants, which measure and limit what each tenant uses.
//!
//! ```text
//! BASE                         the server's group
//! ├── supervisor               the server's process, if version 2 requires that
//! └── fathom-tenants-NUMBER    locked by the server while it runs
//!     ├── tenant-NAME          exists while the tenant has a process
//!     └── ...
//! ```
//!
//! Each hierarchy with a controller that is needed has these groups. Without limits, no groups are
//! created.

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
/// Name of a group that tests the limits. No tenant can have this name.
const PROBE: &str = ":probe";
/// Number of attempts to remove a group, because a process that has ended may stay in its group for
/// a moment.
const ATTEMPTS: u32 = 20;
const INSTANT: Duration = Duration::from_millis(1);
/// Score of a process that the kernel never kills, however much memory it uses.
const NEVER_KILLED: &str = "-1000";
const HARDLY_EVER: &str = "-999";

/// The control groups of this server.
#[derive(Default)]
pub struct Groups(Vec<Place>);

/// The groups in one hierarchy.
struct Place {
    base: Base,
    controllers: Vec<Controller>,
    dir: PathBuf,
    /// The lock on the directory. A process that can lock it knows that the server has ended.
    lock: File,
    /// Whether this process must remove the groups.
    is_own: bool,
}

impl Groups {
    /// Creates the groups that these limits need, and tests each limit. The error is one line for
    /// the user.
    pub fn new(limits: &[Allowance]) -> Result<Groups, String> {
        let mut groups = Groups::default();
        groups.extend(limits)?;
        Ok(groups)
    }

    /// Adds the groups that these limits need, and tests each limit.
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

    /// Creates the group for a tenant's next process, and sets its limits. `present`: the group of
    /// the tenant's current process, if there is one. None: nothing is limited.
    pub fn enter(
        &self,
        tenant: &str,
        limits: &Allowance,
        present: Option<Arc<Group>>,
    ) -> Result<Option<Arc<Group>>, String> {
        if *limits == Allowance::default() && present.is_none() {
            return Ok(None);
        }
        // (The current group may have been made for fewer hierarchies.)
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

    /// Returns the group of a tenant's running process. None: the process has no group.
    pub fn adopt_group(&self, tenant: &str) -> Option<Arc<Group>> {
        let mut group = self.group(tenant);
        group.0.retain(|part| part.dir.is_dir());
        (!group.0.is_empty()).then(|| Arc::new(group))
    }

    /// Returns the groups for a successor of this supervisor.
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

    /// Takes over a predecessor's groups, which the predecessor owns until [`Groups::own`].
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
            // A server that removes leftover groups may have locked the directory first.
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

/// Locks the directory. None: another process has the lock, or the directory was removed.
fn lock(dir: &Path) -> Option<File> {
    let file = File::open(dir).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    let (here, there) = (file.metadata().ok()?, fs::metadata(dir).ok()?);
    (here.ino() == there.ino()).then_some(file)
}

/// Removes the groups of servers that were killed. Groups of running servers are locked.
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

/// Removes a server's group, and those of its tenants' groups that contain no process.
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
                // (The next server tries again.)
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

/// The control group of one tenant, in each hierarchy. When this value is dropped, a group without
/// processes is removed.
pub struct Group(Vec<Part>);

struct Part {
    version: Version,
    controllers: Vec<Controller>,
    dir: PathBuf,
}

impl Group {
    /// Moves a process into the group. Must be called before the process does anything.
    pub fn put(&self, pid: u32) -> io::Result<()> {
        for part in &self.0 {
            files::put(&part.dir, pid)?;
        }
        // At the memory limit, a process that the kernel never kills would only hang.
        let score = format!("/proc/{pid}/oom_score_adj");
        match fs::read_to_string(&score)?.trim() == NEVER_KILLED {
            true => fs::write(score, HARDLY_EVER),
            false => Ok(()),
        }
    }

    /// Returns the limits, and what the group uses, as the kernel reports them.
    pub fn limits(&self) -> TenantLimits {
        let mut limits = TenantLimits::default();
        for part in &self.0 {
            for controller in &part.controllers {
                files::read(part.version, &part.dir, *controller, &mut limits);
            }
        }
        limits
    }

    /// Number of processes in the group that the kernel has killed because of the memory limit.
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
