//! Hands the registry's state over to a successor.

use super::{Registry, Settings};
use crate::definition::{Definition, Definitions};
use crate::entry::{Entry, Presence};
use crate::event::Effect;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which a successor retries to open the disks that its predecessor could not open.
const RETRY: Duration = Duration::from_secs(5);

impl Registry {
    /// Returns the definitions of served disks, and all others. No operation may be in progress.
    pub fn to_handover(&self) -> (BTreeMap<String, Definition>, Definitions) {
        let mut served = BTreeMap::new();
        let mut others = Definitions::default();
        for (name, entry) in &self.entries {
            if let Some(declared) = &entry.declared {
                others.declared.insert(name.clone(), (**declared).clone());
            }
            if !entry.left_images.is_empty() {
                others
                    .left_images
                    .insert(name.clone(), entry.left_images.clone());
            }
            let Some(owner) = entry.owner.clone() else {
                continue;
            };
            if let Presence::Failed { problem, .. } = &entry.presence {
                others.failures.insert(name.clone(), problem.clone());
            }
            match entry.is_served() {
                true => served.insert(name.clone(), owner),
                false => others.absent.insert(name.clone(), owner),
            };
        }
        (served, others)
    }

    /// Creates a successor's registry, and returns the operations to start, too.
    pub fn from_handover(
        settings: Settings,
        served: BTreeMap<String, Definition>,
        others: Definitions,
        places: BTreeMap<String, String>,
    ) -> (Registry, Vec<Effect>) {
        let mut registry = Registry::new(settings, [], places);
        for (name, spec) in others.declared {
            registry.entry(&name).declared = Some(Box::new(spec));
        }
        for (name, left) in others.left_images {
            registry.entry(&name).left_images = left;
        }
        for (name, owner) in others.absent {
            registry.entry(&name).owner = Some(owner);
        }
        for (name, owner) in served {
            let entry: &mut Entry = registry.entry(&name);
            entry.owner = Some(owner);
            entry.presence = Presence::Served;
        }
        let mut effects = Vec::new();
        for (disk, problem) in others.failures {
            registry.entry(&disk).presence = Presence::Failed {
                problem,
                attempts: 1,
                is_final: false,
            };
            effects.push(Effect::RetryAfter { disk, pause: RETRY });
        }
        (registry, effects)
    }
}
