//! Removes trace instances: those of this process, and those of killed runs.

use parking_lot::Mutex;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use super::{PREFIX, instance, probes, put};

/// Paths of this process's instances.
static OURS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Attempts to remove an instance, which a reader keeps busy until it has closed its files.
const PATIENCE: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// Makes the panic hook remove this process's instances if panics abort, because then no destructor
/// runs. If panics unwind, this function does nothing, since destructors remove the instances.
pub fn remove_all_on_abort() {
    static ONCE: Once = Once::new();
    if cfg!(not(panic = "abort")) {
        return;
    }
    ONCE.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            remove_all();
            next(info);
        }));
    });
}

/// Removes this process's instances, for a signal handler that ends it.
pub fn remove_all() {
    for path in std::mem::take(&mut *ours()) {
        let root = path.ancestors().nth(2).unwrap_or(Path::new("/"));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        remove(root, &path, &name);
    }
}

fn ours() -> parking_lot::MutexGuard<'static, Vec<PathBuf>> {
    OURS.lock()
}

pub(super) fn remember(path: &Path) {
    ours().push(path.to_owned());
}

pub(super) fn forget(path: &Path) {
    ours().retain(|one| one != path);
}

/// Removes an instance and its probes.
pub(super) fn remove(root: &Path, path: &Path, name: &str) {
    // Removing the instance also disables its events.
    for (file, text) in [("tracing_on", "0"), ("current_tracer", "nop")] {
        let _ = put(&path.join(file), text);
    }
    disable_group(path, name);
    probes::remove_group(root, name);
    for _ in 0..PATIENCE {
        match fs::remove_dir(path) {
            Err(error) if error.raw_os_error() == Some(16) => std::thread::sleep(PAUSE), // EBUSY
            _ => break,
        }
    }
}

/// Disables a group's probes, because an enabled probe cannot be removed.
fn disable_group(path: &Path, name: &str) {
    let _ = put(&path.join("events").join(name).join("enable"), "0");
}

/// Removes the instances whose owners have ended, and probes without an instance.
pub(super) fn sweep(root: &Path) {
    let is_ours = |name: &str| name.starts_with(&format!("{PREFIX}_"));
    let entries = fs::read_dir(root.join("instances")).into_iter().flatten();
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !is_ours(&name) {
            continue;
        }
        // A living owner holds the lock.
        if let Some(lock) = instance::lock(&path) {
            remove(root, &path, &name);
            drop(lock);
        }
    }
    let has_instance = |group: &str| root.join("instances").join(group).is_dir();
    for (group, _) in probes::list(root) {
        if is_ours(&group) && !has_instance(&group) {
            probes::remove_group(root, &group);
        }
    }
}
