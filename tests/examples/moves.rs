//! Measures how long a guest's disk does not respond while the guest moves: `moves ROUNDS`.
//!
//! The rounds alternate between a disk that both hosts reach, one that is copied before the move,
//! and one that follows (post-copy). The hosts are network namespaces, so the program needs root.

use std::time::Duration;

use fathom_lab::Guest;
use fathom_testing::Deadline;
use fathom_tests::moves::Moves;
use serde_json::{Value, json};

const STEP: Duration = Duration::from_secs(120);

fn main() {
    let rounds = std::env::args().nth(1).map_or(Ok(5), |text| text.parse());
    let Ok(rounds) = rounds else {
        eprintln!("moves ROUNDS");
        std::process::exit(2);
    };
    let ways = [Way::Shared, Way::Moved, Way::Followed];
    let mut pauses = ways.map(|_| Vec::new());
    println!("longest read of 4k, one at a time, while a guest moves (ms)");
    println!("round  shared  moved  followed");
    for round in 1..=rounds {
        let all = ways.map(pause);
        println!("{round:5} {:7.1} {:6.1} {:9.1}", all[0], all[1], all[2]);
        for (all, pause) in pauses.iter_mut().zip(all) {
            all.push(pause);
        }
    }
    let [shared, moved, followed] = pauses.map(median);
    println!("median {shared:6.1} {moved:6.1} {followed:9.1}");
    println!(
        "against shared {:+6.1} {:+9.1}",
        moved - shared,
        followed - shared
    );
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Shared,
    Moved,
    Followed,
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Returns the longest latency of a read in milliseconds.
fn pause(way: Way) -> f64 {
    let moves = Moves::new(way == Way::Shared);
    let mut here = moves.begin();
    let device = here.guest.device("disk").unwrap();
    // Fills a part of the disk, and changes it during the move.
    let fill = format!("dd if=/dev/urandom of={device} bs=1M count=64 oflag=direct 2>/dev/null");
    here.guest.check(&fill, STEP).unwrap();
    let common = format!("--filename={device} --direct=1 --bs=4k --time_based --runtime=14");
    let load = format!(
        "(fio --name=w --rw=randwrite --size=64M --rate_iops=200 {common} >/dev/null 2>&1 &
          fio --name=r --rw=randread --size=64M --output-format=json {common} >/tmp/r.json 2>&1
          touch /tmp/done) >/dev/null 2>&1 &"
    );
    here.guest.check(&load, STEP).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let mut there = match way {
        Way::Followed => moves.prepare_follower(1),
        _ => moves.prepare(1),
    };
    moves.migrate(&mut here, &mut there, 1);
    there.guest.wait_event("RESUME", STEP).unwrap();
    // Only the guest quits: a disk that follows still needs the source's server.
    here.guest.quit().unwrap();
    let deadline = Deadline::new("the end of fio");
    while there
        .guest
        .check("ls /tmp/done 2>/dev/null || true", STEP)
        .unwrap()
        .is_empty()
    {
        deadline.check();
        std::thread::sleep(Duration::from_millis(200));
    }
    longest(&mut there.guest)
}

fn longest(guest: &mut Guest) -> f64 {
    let text = guest.check("cat /tmp/r.json", STEP).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|_| json!({}));
    let longest = report["jobs"][0]["read"]["clat_ns"]["max"].as_f64();
    longest.unwrap_or_else(|| panic!("fio says: {text}")) / 1e6
}
