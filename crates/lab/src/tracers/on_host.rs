//! Who records a disk's way through its host. A collector that is to follow requests has one line here.

use super::scene::Scene;
use super::{Collector, block, fathom, io_calls, kvm, syscalls};
use crate::error::Result;
use fathom_units::cause;

/// Starts a collector; `None`: there is nothing for it here.
pub type Start = fn(&Scene) -> Option<Result<Box<dyn Collector>>>;

/// Of requests, on their way through all layers.
pub const LAYERS: &[(&str, Start)] = &[
    (block::NAME, block::in_scene),
    (fathom::NAME, fathom::in_scene),
    (io_calls::NAME, io_calls::in_scene),
    (kvm::NAME, kvm::in_scene),
];

/// Of what threads ask of the kernel, which costs more.
pub const CALLS: &[(&str, Start)] = &[(syscalls::NAME, syscalls::in_scene)];

/// Starts them. One that cannot be had is a problem, and leaves its layers to those around it.
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
