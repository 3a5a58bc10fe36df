//! The worlds that are explored.

use crate::explore::{Explored, explore};
use crate::world::{Budget, World, disk, put, remove};
use fathom_control::{Condition, Removal, Request, SwitchTo, version_of};
use fathom_spec::DiskSpec;
use std::collections::BTreeMap;

/// Returns requests for every change of a disk of this name on image `/a`.
pub fn all_changes(name: &str) -> Vec<(String, Request)> {
    let spec = disk(name, "/a");
    let changed = DiskSpec {
        readonly: true,
        ..spec.clone()
    };
    let until_restart = Request::Put {
        spec: Box::new(changed.clone()),
        named: None,
        until_restart: true,
        only_if: Condition::default(),
    };
    vec![
        put(&spec),
        put(&changed),
        put(&disk(name, "/c")),
        (name.to_owned(), until_restart),
        remove(name, Removal::Definition),
        remove(name, Removal::UntilRestart),
        set_filter(name),
        switch(name, SwitchTo::Layer("/b".into())),
        switch(name, SwitchTo::Mirror),
        (name.to_owned(), Request::Adopt { defined_at: None }),
    ]
}

pub fn set_filter(name: &str) -> (String, Request) {
    let request = Request::SetFilter {
        filter: "delay".into(),
        options: BTreeMap::from([("read".into(), "2ms".into())]),
        until_restart: false,
    };
    (name.to_owned(), request)
}

pub fn switch(name: &str, to: SwitchTo) -> (String, Request) {
    let request = Request::Switch {
        to,
        transient: true,
        leave_bitmaps: false,
    };
    (name.to_owned(), request)
}

/// Returns a request to change the disk on the condition that it equals `before`.
pub fn conditional(before: &DiskSpec, after: &DiskSpec) -> (String, Request) {
    let before = before.clone().without_defaults();
    let request = Request::Put {
        spec: Box::new(after.clone()),
        named: None,
        until_restart: false,
        only_if: Condition {
            wanted: vec![version_of(&before).unwrap()],
            unwanted: Vec::new(),
        },
    };
    (after.name.clone(), request)
}

/// Returns a world with one persistent disk on `/a`.
pub fn persistent(budget: Budget) -> World {
    let mut world = World::start(vec![], vec![disk("d", "/a")], &["/a", "/c"], budget);
    world.menu = all_changes("d");
    world
}

/// Returns a world with one static disk on `/a`.
pub fn of_configuration(budget: Budget) -> World {
    let mut world = World::start(vec![disk("d", "/a")], vec![], &["/a", "/c"], budget);
    world.menu = all_changes("d");
    world
}

fn holds(name: &str, world: World) {
    let Explored {
        states,
        is_cut,
        violation,
    } = explore(world);
    let all = if is_cut { "at least" } else { "all" };
    println!("{name}: {all} {states} states");
    if let Some(problem) = violation {
        panic!("{name}: {problem}");
    }
    assert!(states > 1000, "{name}: only {states} states");
}

#[test]
fn persistent_disk_keeps_acknowledged_writes_on_failures() {
    let budget = Budget {
        requests: 2,
        crashes: 1,
        failures: 2,
        writes: 2,
        ..Budget::default()
    };
    holds("persistent", persistent(budget));
}

#[test]
fn reread_definitions_do_not_undo_a_change_in_progress() {
    let budget = Budget {
        requests: 2,
        crashes: 1,
        writes: 1,
        reloads: 2,
        ..Budget::default()
    };
    holds("reloaded", persistent(budget));
}

#[test]
fn static_disk_never_returns_to_a_superseded_image() {
    let budget = Budget {
        requests: 2,
        crashes: 2,
        failures: 1,
        writes: 2,
        ..Budget::default()
    };
    holds("static", of_configuration(budget));
}

#[test]
fn edits_of_the_configuration_never_have_two_owners() {
    let budget = Budget {
        requests: 2,
        crashes: 1,
        writes: 1,
        edits: 2,
        reloads: 2,
        ..Budget::default()
    };
    let mut world = of_configuration(budget.clone());
    let contents = |image: &str| BTreeMap::from([("d".to_owned(), disk("d", image))]);
    world.edits = vec![BTreeMap::new(), contents("/b"), contents("/a")];
    holds("edited static", world.clone());
    let mut world = persistent(budget);
    world.edits = vec![BTreeMap::new(), contents("/b"), contents("/a")];
    holds("edited persistent", world);
}

#[test]
fn two_disks_never_write_to_one_image() {
    let budget = Budget {
        requests: 3,
        crashes: 1,
        failures: 1,
        writes: 1,
        ..Budget::default()
    };
    let mut world = World::start(vec![], vec![disk("d", "/a")], &["/a", "/c"], budget);
    world.menu = vec![
        put(&disk("e", "/a")),
        put(&disk("e", "/c")),
        remove("d", Removal::Definition),
        remove("e", Removal::UntilRestart),
        switch("d", SwitchTo::Layer("/b".into())),
        put(&disk("d", "/a")),
    ];
    holds("two disks", world);
}

/// A lying process of a tenant harms only its own disk.
///
/// Every request gets its reply, no name gets a second owner, and everything that is reported as
/// stored is stored.
#[test]
fn tenant_that_answers_anything_harms_no_other_disk() {
    let budget = Budget {
        requests: 3,
        crashes: 1,
        writes: 1,
        reloads: 1,
        lies: 2,
        ..Budget::default()
    };
    let mut lying = disk("d", "/a");
    lying.tenant = Some("t".into());
    let changed = DiskSpec {
        readonly: true,
        ..lying.clone()
    };
    let honest = disk("e", "/e");
    let changed_honest = DiskSpec {
        readonly: true,
        ..honest.clone()
    };
    for files in [vec![lying.clone(), honest.clone()], vec![honest.clone()]] {
        let mut world = World::start(vec![], files, &["/a", "/e"], budget.clone());
        world.host.hostile = Some("d".into());
        world.menu = vec![
            put(&lying),
            put(&changed),
            remove("d", Removal::Definition),
            remove("d", Removal::UntilRestart),
            set_filter("d"),
            put(&changed_honest),
            remove("e", Removal::Definition),
            switch("e", SwitchTo::Layer("/b".into())),
        ];
        holds("hostile tenant", world);
    }
}

#[test]
fn one_of_two_conditional_changes_succeeds() {
    let budget = Budget {
        requests: 3,
        failures: 1,
        reloads: 1,
        ..Budget::default()
    };
    holds("conditional", two_conditional_changes(budget));
}

pub fn two_conditional_changes(budget: Budget) -> World {
    let before = disk("d", "/a");
    let changed = |iothreads| DiskSpec {
        iothreads: Some(iothreads),
        ..before.clone()
    };
    let mut world = World::start(vec![], vec![before.clone()], &["/a", "/c"], budget);
    world.menu = vec![
        conditional(&before, &changed(2)),
        conditional(&before, &changed(3)),
        set_filter("d"),
    ];
    world
}
