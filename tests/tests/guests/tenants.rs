//! `kill -9` of tenants in the middle of verified loads: each is started again by its supervisor, at
//! whose socket QEMU waits for it, and the guest notices nothing.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use fathom_lab::{Disk, Guest, Machine};
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;
use fathom_tests::{Place, fathom, run};

const MIB: u64 = 1 << 20;
const KILLS: u64 = 4;
const STEP: Duration = Duration::from_secs(60);
const CASES: &[(&str, Kind, &str)] = &[
    ("raw", Kind::RAW, "raw"),
    ("qcow2", Kind::QCOW2_BACKED, "qcow2"),
    ("qed", Kind::QED_SMALL, "qed"),
];

/// The supervisor; ends with the test.
struct Supervisor(Child);

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(place: &Place, images: &[Image]) -> Supervisor {
    let sockets = place.sockets();
    let api = sockets.join("api");
    let mut text = format!("sandbox = 'on'\ntenants = true\napi = {{ socket = {api:?} }}\n");
    for (image, (name, _, format)) in images.iter().zip(CASES) {
        let (socket, image) = (sockets.join(name), image.path());
        text += &format!(
            "[[disk]]\nname = {name:?}\nimage = {image:?}\nformat = {format:?}\n\
             vhost-user = {socket:?}\n"
        );
    }
    let file = place.path("tenants.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = Command::new(fathom());
    command.args(["serve", "--config"]).arg(file);
    let supervisor = Supervisor(command.spawn().unwrap());
    let start = Instant::now();
    while !api.exists() {
        assert!(start.elapsed() < STEP, "the API has not come");
        std::thread::sleep(Duration::from_millis(20));
    }
    supervisor
}

/// The process that serves the disk now; None: it is just being started.
fn process_of(api: &Path, disk: &str) -> Option<String> {
    let shown = run(&["info", api.to_str()?, "--disk", disk, "--json"], STEP);
    let shown: serde_json::Value = serde_json::from_str(&shown.stdout).ok()?;
    Some(shown["pid"].as_u64()?.to_string())
}

#[test]
fn the_guest_survives_kill_9_of_its_tenants() {
    let place = Place::new();
    let images = CASES.iter().map(|(name, kind, _)| {
        let path = place.path(name);
        Image::create(path, *kind, 64 * MIB)
    });
    let images: Vec<_> = images.collect();
    let mut supervisor = start(&place, &images);
    let disk = |(name, ..): &(&str, Kind, &str)| {
        Disk::vhost_user(name, &place.sockets().join(name))
            .with_queues(2)
            .with_reconnect()
    };
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: CASES.iter().map(disk).collect(),
        ..Machine::default()
    })
    .unwrap();
    let names: Vec<_> = CASES.iter().map(|(name, ..)| *name).collect();
    let load = Load::start(&mut guest, &names, 16 * MIB, 400);
    load.wait_for_writes(&mut guest);
    let api = place.sockets().join("api");
    let mut killed = 0;
    for _ in 0..KILLS {
        for name in &names {
            let Some(pid) = process_of(&api, name) else {
                continue;
            };
            let kill = Command::new("kill").args(["-9", &pid]).status();
            killed += u64::from(kill.unwrap().success());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    assert!(killed >= KILLS, "{killed}");
    load.expect_running(&mut guest);
    load.finish(&mut guest);
    guest.quit().unwrap();
    let quit = run(&["quit", api.to_str().unwrap()], STEP);
    assert_eq!(quit.code, Some(0), "{}", quit.stderr);
    assert!(supervisor.0.wait().unwrap().success());
    for image in &images {
        image.check_clean();
        load.verify_on_host(&image.flat());
    }
}
