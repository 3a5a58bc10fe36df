//! Properties that hold in every state.

use crate::world::World;
use fathom_control::{Definition, Request};
use std::collections::BTreeSet;

/// Checks all properties. The error says which one is violated.
pub fn check(world: &World) -> Result<(), String> {
    serves_everything_acknowledged(world)?;
    has_one_writer(world)?;
    has_one_owner(world)?;
    nobody_waits_for_ever(world)?;
    failed_disks_are_retried(world)?;
    is_served_after_crash(world)?;
    match world.conditional_successes {
        0 | 1 => Ok(()),
        _ => Err("two requests with the same If-Match have succeeded".into()),
    }
}

/// The served image has every acknowledged write. A hostile process may lose its own disk's writes.
fn serves_everything_acknowledged(world: &World) -> Result<(), String> {
    let hostile = world.host.hostile.as_ref();
    for (name, disk) in &world.host.disks {
        if hostile == Some(name) {
            continue;
        }
        let image = disk.spec.image.to_string();
        let has = world.host.images[&image].writes;
        let wanted = world.host.acknowledged.get(name).copied().unwrap_or(0);
        if has < wanted && !world.edited.contains(name) {
            return Err(format!(
                "disk '{name}' is served from {image}, which has {has} of {wanted} writes"
            ));
        }
    }
    Ok(())
}

fn has_one_writer(world: &World) -> Result<(), String> {
    let mut images = BTreeSet::new();
    for disk in world.host.disks.values() {
        let image = disk.spec.image.to_string();
        if !images.insert(image.clone()) {
            return Err(format!("two disks write to {image}"));
        }
    }
    Ok(())
}

/// No name is both in the configuration and in a file, unless the user has put it there.
fn has_one_owner(world: &World) -> Result<(), String> {
    let both = { world.store.files.keys() }.find(|name| world.config.contains_key(*name));
    match both {
        Some(name) if !world.is_edited => Err(format!(
            "disk '{name}' has two owners: the configuration and a file"
        )),
        _ => Ok(()),
    }
}

/// When no operation is in progress, every request has its reply.
fn nobody_waits_for_ever(world: &World) -> Result<(), String> {
    match world.is_quiet() && !(world.outstanding.is_empty() && world.registry.is_settled()) {
        true => Err("a request waits, and nothing is in progress".into()),
        false => Ok(()),
    }
}

/// Each failed disk that the server promises to retry has an attempt ahead of it.
fn failed_disks_are_retried(world: &World) -> Result<(), String> {
    let mut retried = world.registry.failures().filter(|one| one.is_retried);
    match retried.find(|one| world.is_quiet() && !world.retries.contains(one.name)) {
        Some(one) => Err(format!("disk '{}' is not tried again", one.name)),
        None => Ok(()),
    }
}

/// After a crash without failures, each disk with a file is served.
///
/// An exception is a disk whose file the configuration contradicts.
fn is_served_after_crash(world: &World) -> Result<(), String> {
    let is_changed = world.has_failed || world.is_edited;
    let is_meant = world.has_crashed && world.is_quiet() && !is_changed;
    if !is_meant || world.next_id > world.asked_before_crash {
        return Ok(());
    }
    for (name, spec) in &world.store.files {
        let declared = world.config.get(name);
        let is_contradicted = declared.is_some_and(|other| !other.other_data(spec).is_empty());
        let is_used = world
            .host
            .disks
            .values()
            .any(|disk| disk.spec.image == spec.image);
        let image = world.host.images.get(&spec.image.to_string());
        let mark = image.and_then(|image| image.mark.as_ref());
        let is_left_by_other = mark.is_some_and(|mark| mark.disk != *name);
        if !is_contradicted && !is_used && !is_left_by_other && !world.host.disks.contains_key(name)
        {
            return Err(format!("disk '{name}' is not served after a restart"));
        }
    }
    Ok(())
}

/// Checks the properties of a successful request.
pub fn check_reply(world: &World, disk: &str, request: &Request) -> Result<(), String> {
    let (served, others) = world.registry.to_handover();
    let definition = served.get(disk).or_else(|| others.absent.get(disk));
    let Some(Definition::Persistent(stored)) = definition else {
        return Ok(());
    };
    let file = world.store.files.get(disk);
    let is_stored = match request {
        Request::Put {
            spec,
            until_restart: false,
            ..
        } => file == Some(&spec.clone().without_defaults().with_format()),
        Request::SetFilter {
            until_restart: false,
            ..
        }
        | Request::Adopt { .. } => file == Some(stored),
        _ => true,
    };
    match is_stored {
        true => Ok(()),
        false => Err(format!(
            "disk '{disk}': a change has succeeded, and is not in its file"
        )),
    }
}
