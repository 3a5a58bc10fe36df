//! Tests two hosts from end to end, as docs/fleet.md describes them.
//!
//! The hosts have servers with configurations and a disk above a remote image, whose guest moves to
//! the other host. A single view shows both hosts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine};
use fathom_testing::{Deadline, until};
use fathom_tests::hosts::Hosts;
use fathom_tests::load::Load;
use fathom_tests::moves::make_certificates;
use fathom_tests::{Place, fathom, run};
use serde_json::{Value, json};

use super::migration::{expect_no_io_errors, wait_migrated};

const STEP: Duration = Duration::from_secs(120);
const SIZE: u64 = 256 << 20;
/// Size of the part to which the load writes. The base image behind that part is unchanged.
const CHANGED: u64 = 32 << 20;
const BEHIND: u64 = 64 << 20;

/// The server of a host; it ends with the test.
struct Host {
    child: Child,
    api: PathBuf,
    socket: PathBuf,
}

impl Host {
    fn start(hosts: &Hosts, place: &Place, certificates: &Path, n: usize) -> Host {
        let path = |name: &str| place.sockets().join(format!("{name}-{n}"));
        let (api, socket, disks) = (path("api"), path("web"), place.path(&format!("disks-{n}")));
        fs::create_dir(&disks).unwrap();
        let config = format!(
            "disks-dir = {disks:?}\n\
             api = {{ socket = {api:?}, listen = '0.0.0.0:9826', tls-certificates = {certificates:?} }}\n\
             [nbd]\nlisten = ['tcp:0.0.0.0:10809']\ntls = 'require'\n\
             tls-certificates = {certificates:?}\ntls-verify-peer = true\n"
        );
        let file = place.path(&format!("fathom-{n}.toml"));
        fs::write(&file, config).unwrap();
        let mut serve = Command::new(fathom());
        serve.args(["serve", "--config"]).arg(file);
        let child = hosts.on(n, || serve.spawn().unwrap());
        until("the API's socket", || api.exists());
        Host { child, api, socket }
    }

    fn add(&self, image: &Path, args: &[&str]) {
        let (api, socket) = (text(&self.api), text(&self.socket));
        let add = ["disk", "add", "web", text(image), "--format", "qcow2"];
        let to = ["--server", api, "--vhost-user", socket];
        done(&[&add[..], &to, args].concat());
    }

    fn shown(&self) -> Value {
        let show = ["disk", "show", text(&self.api), "--disk", "web", "--json"];
        serde_json::from_str(&done(&show)).unwrap()
    }

    fn wait_for_phase(&self, phase: &str) {
        let what = format!("phase '{phase}'");
        let deadline = Deadline::new(&what);
        loop {
            let shown = self.shown();
            if shown["pull"]["phase"] == phase {
                return;
            }
            deadline.check_with(|| shown.to_string());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn done(args: &[&str]) -> String {
    let ended = run(args, STEP);
    assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    ended.stdout
}

fn machine(host: &Host, incoming: bool) -> Machine {
    Machine {
        cpus: 2,
        memory_mib: 192,
        disks: vec![Disk::vhost_user("web", &host.socket).with_reconnect()],
        incoming,
        ..Machine::default()
    }
}

fn sum_behind(guest: &mut Guest) -> String {
    let device = guest.device("web").unwrap();
    let sum = format!("dd if={device} bs=1M skip=32 count=32 iflag=direct 2>/dev/null | sha256sum");
    guest.check(&sum, STEP).unwrap().trim().to_owned()
}

#[test]
fn two_hosts_from_end_to_end() {
    let (hosts, place) = (Hosts::new(), Place::new());
    let certificates = place.path("tls");
    make_certificates(&certificates);
    let [mut one, other] = [0, 1].map(|n| Host::start(&hosts, &place, &certificates, n));
    // A base image at a remote server.
    let image = place.path("base.raw");
    let noise = format!("head -c {BEHIND} /dev/urandom >\"$0\"; truncate -s {SIZE} \"$0\"");
    let made = Command::new("sh").args(["-c", &noise]).arg(&image).status();
    assert!(made.unwrap().success());
    let far = ["--readonly", "--nbd", "tcp:0.0.0.0:10810"];
    let far = hosts.on(1, || place.serve("far", &image, &far));
    let base = format!("nbd://{}:10810/", hosts.address(1));
    // A disk on top of the base image.
    let images = ["web-0.qcow2", "web-1.qcow2"].map(|name| place.path(name));
    let size = SIZE.to_string();
    let create = ["img", "create", "-q", "-f", "qcow2"];
    let above = ["-u", "-b", &base, "-F", "raw", text(&images[0]), &size];
    done(&[&create[..], &above].concat());
    let cache = place.path("cache");
    let with_base = ["--base", &base, "--base-cache", text(&cache), "--nbd-move"];
    one.add(&images[0], &with_base);
    let mut guest = hosts.on(0, || Guest::boot(&machine(&one, false)).unwrap());
    let before = sum_behind(&mut guest);
    let load = Load::start(&mut guest, &["web"], CHANGED, 300);
    load.wait_for_writes(&mut guest);
    // The guest and its disk move.
    done(&[&create[..], &[text(&images[1]), &size]].concat());
    let from = hosts.address(0);
    let uri = format!(
        "nbds://{from}/web?tls-certificates={}",
        certificates.display()
    );
    other.add(&images[1], &["--pull", &uri]);
    other.wait_for_phase("ready");
    let mut there = hosts.on(1, || Guest::start(&machine(&other, true)).unwrap());
    let port = json!({"uri": "tcp:0.0.0.0:4077"});
    there.qmp("migrate-incoming", port).unwrap();
    let to = json!({"uri": format!("tcp:{}:4077", hosts.address(1))});
    guest.qmp("migrate", to).unwrap();
    wait_migrated(&mut guest);
    there.wait_event("RESUME", STEP).unwrap();
    other.wait_for_phase("done");
    guest.quit().unwrap();
    load.wait_for_more_writes(&mut there);
    // Any host can query both.
    let both = [hosts.address(0), hosts.address(1)].join(",");
    let fleet = |command| -> Value {
        let from = [
            "--hosts",
            &both,
            "--certificates",
            text(&certificates),
            "--json",
        ];
        let args = [&["fleet", command][..], &from].concat();
        serde_json::from_str(&hosts.on(0, || done(&args))).unwrap()
    };
    let listed = fleet("list");
    for host in listed["hosts"].as_array().unwrap() {
        assert_eq!(host["disks"][0]["name"], "web", "{listed}");
    }
    assert_eq!(listed["hosts"].as_array().unwrap().len(), 2, "{listed}");
    let stats = fleet("stats");
    assert!(stats.to_string().contains("\"write\""), "{stats}");
    // Neither the first host nor the remote server is needed any more.
    let _ = one.child.kill();
    drop(far);
    let left = fleet("list");
    assert!(left.to_string().contains(&hosts.address(0)), "{left}");
    load.finish(&mut there);
    assert_eq!(sum_behind(&mut there), before);
    expect_no_io_errors(&mut there);
    there.power_off().unwrap();
    drop(other);
    let check = Command::new("qemu-img")
        .arg("check")
        .arg(&images[1])
        .output();
    assert!(check.unwrap().status.success());
}
