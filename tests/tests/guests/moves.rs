//! Tests a guest that moves from one host to another with its disk, again and again.

use std::env;
use std::process::Command;
use std::time::Duration;

use fathom_lab::Guest;
use fathom_testing::Deadline;
use fathom_tests::load::Load;
use fathom_tests::moves::{Moves, wait_for_log, wait_for_nth};
use serde_json::json;

use super::migration::{expect_no_io_errors, wait_migrated};

const STEP: Duration = Duration::from_secs(120);

/// Number of blocks that the load writes per second.
const RATE: u32 = 300;
const LOAD_BYTES: u64 = 24 << 20;

/// Returns the number of moves; FATHOM_MOVES selects more.
fn moves_wanted() -> usize {
    let wanted = env::var("FATHOM_MOVES").ok();
    wanted.map_or(4, |wanted| wanted.parse().expect("a number"))
}

#[test]
fn a_guest_and_its_disk_move_between_hosts_under_verified_load() {
    let moves = Moves::new(false);
    let many = moves_wanted();
    let mut here = moves.begin();
    let load = Load::start(&mut here.guest, &["disk"], LOAD_BYTES, RATE);
    load.wait_for_writes(&mut here.guest);
    for n in 1..=many {
        let mut there = moves.prepare(n);
        // QEMU has kept the in-flight state for the new server, and the other host copies the disk
        // anew.
        moves.replace_server(&mut here, n - 1);
        wait_for_nth(&mut there.server, "the guest can move here", 2);
        moves.migrate(&mut here, &mut there, n);
        wait_migrated(&mut here.guest);
        there.guest.wait_event("RESUME", STEP).unwrap();
        wait_for_log(&mut there.server, "copied completely");
        // The old copy of the disk is no longer needed.
        here.guest.quit().unwrap();
        here.server.stop().unwrap();
        std::fs::remove_file(here.image.path()).unwrap();
        here = there;
        // In-flight requests are recorded only in the memory that QEMU has kept.
        load.wait_for_more_writes(&mut here.guest);
        moves.replace_server(&mut here, n);
        load.wait_for_more_writes(&mut here.guest);
    }
    let written = load.finish(&mut here.guest);
    expect_no_io_errors(&mut here.guest);
    here.guest.power_off().unwrap();
    here.server.stop().unwrap();
    here.image.check_clean();
    written.verify_on_host(&here.image.flat());
}

/// Post-copy: the guest resumes at once, and its disk is copied afterwards. Servers of both hosts
/// are killed meanwhile.
#[test]
fn guest_continues_at_once_while_its_disk_is_pulled() {
    let moves = Moves::new(false);
    let mut here = moves.begin();
    // Data that the guest does not access, and that takes a while to copy.
    let device = here.guest.device("disk").unwrap();
    let fill = format!("dd if=/dev/urandom of={device} bs=1M seek=200 count=250 oflag=direct");
    here.guest.check(&fill, STEP).unwrap();
    let load = Load::start(&mut here.guest, &["disk"], LOAD_BYTES, RATE);
    load.wait_for_writes(&mut here.guest);
    let mut there = moves.prepare_follower(1);
    moves.migrate(&mut here, &mut there, 1);
    wait_migrated(&mut here.guest);
    there.guest.wait_event("RESUME", STEP).unwrap();
    wait_for_log(&mut there.server, "and the remaining data is copied");
    here.guest.quit().unwrap();
    load.wait_for_more_writes(&mut there.guest);
    moves.replace_follower(&mut there, 1);
    load.wait_for_more_writes(&mut there.guest);
    moves.replace_server(&mut here, 0);
    load.wait_for_more_writes(&mut there.guest);
    wait_for_log(&mut there.server, "copied completely");
    here.server.stop().unwrap();
    load.wait_for_more_writes(&mut there.guest);
    let written = load.finish(&mut there.guest);
    expect_no_io_errors(&mut there.guest);
    there.guest.power_off().unwrap();
    there.server.stop().unwrap();
    written.verify_on_host(&there.image.flat());
}

/// If a process of the other host is killed before the guest has arrived, the guest continues at
/// the source.
#[test]
fn a_guest_whose_move_is_interrupted_goes_on_where_it_is() {
    let moves = Moves::new(false);
    let mut here = moves.begin();
    let load = Load::start(&mut here.guest, &["disk"], LOAD_BYTES, RATE);
    load.wait_for_writes(&mut here.guest);
    let speed = |guest: &mut Guest, bytes: u64| {
        let bandwidth = json!({ "max-bandwidth": bytes });
        guest.qmp("migrate-set-parameters", bandwidth).unwrap();
    };
    // The migration must take long enough to be interrupted.
    speed(&mut here.guest, 1 << 20);
    for delay in [0, 300, 900] {
        // First the target's server is killed along with its machine, then only the machine.
        for what in ["server", "machine"] {
            let mut there = moves.prepare(1);
            moves.migrate(&mut here, &mut there, 1);
            std::thread::sleep(Duration::from_millis(delay));
            if what == "server" {
                kill(there.server.process().pid());
            }
            kill(there.guest.pid());
            drop(there);
            wait_failed(&mut here.guest);
            load.wait_for_more_writes(&mut here.guest);
        }
    }
    speed(&mut here.guest, 1 << 30);
    let mut there = moves.prepare(1);
    moves.migrate(&mut here, &mut there, 1);
    wait_migrated(&mut here.guest);
    there.guest.wait_event("RESUME", STEP).unwrap();
    here.guest.quit().unwrap();
    let written = load.finish(&mut there.guest);
    expect_no_io_errors(&mut there.guest);
    there.guest.power_off().unwrap();
    there.server.stop().unwrap();
    written.verify_on_host(&there.image.flat());
}

fn kill(pid: u32) {
    let killed = Command::new("kill")
        .args(["-KILL", &pid.to_string()])
        .status();
    assert!(killed.unwrap().success());
}

/// Waits until the migration has failed and the guest runs.
fn wait_failed(source: &mut Guest) {
    let deadline = Deadline::new("the migration's failure");
    loop {
        let state = source.qmp("query-migrate", json!({})).unwrap();
        match state["status"].as_str() {
            Some("failed" | "cancelled") => break,
            Some("completed") => panic!("it was to be interrupted"),
            _ => deadline.check_with(|| state.to_string()),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = source.qmp("query-status", json!({})).unwrap();
    assert_eq!(status["running"], true, "{status}");
}
