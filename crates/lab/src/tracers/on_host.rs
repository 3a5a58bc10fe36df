//! Lists the collectors that record a disk's path through its host. Each has one line here.

use super::scene::Scene;
use super::{Collector, block, fathom, io_calls, kvm, syscalls};
use crate::error::Result;
use fathom_units::cause;

/// Starts a collector. `None` means that the scene has nothing for it to record.
pub type Start = fn(&Scene) -> Option<Result<Box<dyn Collector>>>;

/// Collectors that follow requests through all layers.
pub const LAYERS: &[(&str, Start)] = &[
    (block::NAME, block::in_scene),
    (fathom::NAME, fathom::in_scene),
    (io_calls::NAME, io_calls::in_scene),
    (kvm::NAME, kvm::in_scene),
];

/// Collectors of the threads' system calls, which cost more.
pub const CALLS: &[(&str, Start)] = &[(syscalls::NAME, syscalls::in_scene)];

/// Starts the collectors. A collector that fails adds a problem, and its layers are attributed to
/// the layers around them.
pub fn start(
    which: &[(&str, Start)],
    scene: &Scene,
    problems: &mut Vec<String>,
) -> Vec<Box<dyn Collector>> {
    let mut collectors = Vec::new();
    for (name, start) in which {
        match start(scene) {
            None => {}
            Some(Ok(collector)) => collectors.push(collector),
            Some(Err(error)) => problems.push(format!("{name}: {}", cause(error))),
        }
    }
    collectors
}
