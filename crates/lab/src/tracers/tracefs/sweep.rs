//! Leaving nothing behind: removing instances, our own and those of runs that were killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use super::{PREFIX, instance, probes, put};

/// Instances of this process.
static OURS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A reader that is just leaving keeps an instance busy.
const PATIENCE: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// Where a panic aborts the process, no destructor runs: this makes the panic hook remove this
/// process's instances. Where panics unwind it does nothing, since destructors do.
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

/// Removes this process's instances, for a signal that ends it.
pub fn remove_all() {
    for path in std::mem::take(&mut *ours()) {
        let root = path.ancestors().nth(2).unwrap_or(Path::new("/"));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        remove(root, &path, &name);
    }
}

fn ours() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn remember(path: &Path) {
    ours().push(path.to_owned());
}

pub(super) fn forget(path: &Path) {
    ours().retain(|one| one != path);
}

/// Removes an instance and the probes that are for it.
pub(super) fn remove(root: &Path, path: &Path, name: &str) {
    // Removing an instance disables its events.
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

/// An enabled probe cannot be removed.
fn disable_group(path: &Path, name: &str) {
    let _ = put(&path.join("events").join(name).join("enable"), "0");
}

/// Removes the instances whose owners are gone, and probes without an instance.
pub(super) fn sweep(root: &Path) {
    let is_ours = |name: &str| name.starts_with(&format!("{PREFIX}_"));
    let entries = fs::read_dir(root.join("instances")).into_iter().flatten();
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !is_ours(&name) {
            continue;
        }
        // Who holds the lock lives.
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
