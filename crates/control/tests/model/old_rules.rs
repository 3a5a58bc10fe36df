//! Faults of earlier versions: with the old rule, the exploration finds a violation.

use crate::explore::explore;
use crate::scenarios::{of_configuration, persistent, two_conditional_changes};
use crate::world::{Budget, OldRule, World};

fn is_found(world: World, expected: &str) {
    let violation = explore(world).violation;
    let violation = violation.expect("the old rule violates no property");
    println!("{violation}");
    assert!(violation.contains(expected), "{violation}");
}

const ALL: Budget = Budget {
    requests: 3,
    crashes: 1,
    failures: 1,
    writes: 2,
    edits: 0,
    reloads: 0,
    lies: 0,
};

/// `disk change` and PUT wrote a file for a disk of the configuration. The disk was then switched
/// as a persistent disk, but the configuration named the old image after a restart.
#[test]
fn static_disk_that_becomes_persistent_is_found() {
    let mut world = of_configuration(ALL);
    world.old_rule = OldRule::StaticBecomesPersistent;
    is_found(world, "two owners");
}

/// `mirror complete` of an encrypted target wrote the target's name, but not the target's keys.
#[test]
fn switch_that_does_not_store_keys_is_found() {
    let mut world = persistent(ALL);
    world.old_rule = OldRule::KeysAreNotStored;
    is_found(world, "not served after a restart");
}

/// After a switch of a static disk and a restart, the superseded image was served for writing.
#[test]
fn superseded_image_without_a_mark_is_found() {
    let mut world = of_configuration(ALL);
    world.host.marks_nothing = true;
    is_found(world, "of 1 writes");
}

/// After a full disk (ENOSPC), the same change succeeded without being written.
#[test]
fn definition_that_is_noted_before_it_is_written_is_found() {
    let mut world = persistent(ALL);
    world.old_rule = OldRule::NotedBeforeWritten;
    is_found(world, "is not in its file");
}

/// Two requests with one If-Match both succeeded.
#[test]
fn condition_that_is_checked_early_is_found() {
    let mut world = two_conditional_changes(ALL);
    world.old_rule = OldRule::ConditionIsCheckedEarly;
    is_found(world, "the same If-Match");
}

/// Users that continue before the file names the new image lose their writes in a crash.
#[test]
fn switch_that_does_not_hold_users_is_found() {
    let mut world = persistent(ALL);
    world.host.holds_nobody = true;
    is_found(world, "of 1 writes");
}
