//! Tests what QEMU does to a running disk: pauses under load, live migration to another QEMU with a
//! server of its own, hot unplug and hot plug.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_testing::{Deadline, until};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::{Load, Written};
use serde_json::json;

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);

#[test]
fn a_guest_migrates_under_verified_load() {
    let place = Place::new();
    let images = images(&place);
    let nbd =
        |image: &Image, side: &str| place.sockets().join(format!("{}-{side}.nbd", name(image)));
    let serve = |side: &str| -> Vec<Server> {
        let serve = |image: &Image| {
            let address = format!("unix:{}", nbd(image, side).display());
            let args = [ARGS, &["--nbd", &address]].concat();
            image.serve(&place, &format!("{}-{side}", name(image)), &args)
        };
        images.iter().map(serve).collect()
    };
    let source_servers = serve("source");
    let machine = |servers: &[Server]| Machine {
        cpus: 2,
        memory_mib: 256,
        disks: images
            .iter()
            .zip(servers)
            .map(|(image, server)| Disk::vhost_user(name(image), server.socket()))
            .collect(),
        ..Machine::default()
    };
    let mut source = Guest::boot(&machine(&source_servers)).unwrap();
    // The target's servers start while the source has the images.
    let target_servers = serve("target");
    let target = Machine {
        incoming: true,
        ..machine(&target_servers)
    };
    let mut target = Guest::start(&target).unwrap();
    let load = start_load(&mut source, &images, 16 * MIB);
    let clients: Vec<Client> = images
        .iter()
        .map(|i| Client::new(&nbd(i, "source")))
        .collect();
    images
        .iter()
        .for_each(|i| Client::is_denied(&nbd(i, "target")));

    migrate(&place.sockets().join("migration"), &mut source, &mut target);
    // The clients were disconnected with the guest, and have not kept its images from the target.
    clients.into_iter().for_each(Client::has_been_disconnected);
    images
        .iter()
        .for_each(|i| Client::is_denied(&nbd(i, "source")));
    source.quit().unwrap();
    for server in source_servers {
        server.stop().unwrap();
    }

    let written = load.finish(&mut target);
    expect_no_io_errors(&mut target);
    target.power_off().unwrap();
    for server in target_servers {
        server.stop().unwrap();
    }
    verify(&images, &written);
}

/// An NBD client of a server's disk that reads all the time.
struct Client(Child);

impl Client {
    fn new(socket: &Path) -> Client {
        let script = "import nbd, sys\n\
                      h = nbd.NBD()\n\
                      h.connect_unix(sys.argv[1])\n\
                      print('connected', flush=True)\n\
                      while True: h.pread(4096, 0)\n";
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", script])
            .arg(socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("python3 is installed by `make setup`");
        let mut said = [0; 9];
        let heard = child.stdout.as_mut().expect("a pipe").read_exact(&mut said);
        heard.expect("it is let in while the guest runs");
        Client(child)
    }

    fn has_been_disconnected(mut self) {
        until("the end of a client", || {
            self.0.try_wait().expect("a child").is_some()
        });
    }

    /// Asserts that a client is rejected by a server without the guest.
    fn is_denied(socket: &Path) {
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let output = Command::new("nbdinfo").args(["--size", &uri]).output();
        let output = output.expect("nbdinfo is installed by `make setup`");
        assert!(!output.status.success(), "{}", socket.display());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const ARGS: &[&str] = &["--iothreads", "2"];

/// Creates an image of each format; those of qcow2 and QED allocate all the time.
fn images(place: &Place) -> [Image; 4] {
    [
        ("raw", Kind::RAW),
        ("qcow2", Kind::QCOW2_SMALL),
        ("overlay", Kind::QCOW2_BACKED),
        ("qed", Kind::QED_SMALL),
    ]
    .map(|(name, kind)| Image::create(place.path(name), kind, 64 * MIB))
}

fn name(image: &Image) -> &str {
    image.path().file_name().unwrap().to_str().unwrap()
}

/// Starts a load on the disks and waits until it writes on all of them.
fn start_load(guest: &mut Guest, images: &[Image], bytes: u64) -> Load {
    let names: Vec<&str> = images.iter().map(name).collect();
    let load = Load::start(guest, &names, bytes, 400);
    load.wait_for_writes(guest);
    load
}

/// Checks on the host what the load has written.
fn verify(images: &[Image], written: &Written) {
    for image in images {
        image.check_clean();
        written.verify_on_host(&image.flat());
    }
}

/// Migrates the guest through that socket, and waits until it runs at the target.
pub fn migrate(channel: &Path, source: &mut Guest, target: &mut Guest) {
    let uri = format!("unix:{}", channel.display());
    target.qmp("migrate-incoming", json!({"uri": uri})).unwrap();
    source.qmp("migrate", json!({"uri": uri})).unwrap();
    wait_migrated(source);
    target.wait_event("RESUME", STEP).unwrap();
}

pub fn wait_migrated(source: &mut Guest) {
    let deadline = Deadline::new("the migration's end");
    loop {
        let state = source.qmp("query-migrate", json!({})).unwrap();
        match state["status"].as_str() {
            Some("completed") => return,
            Some("failed" | "cancelled") => panic!("migration: {state}\n{}", source.qemu_log()),
            _ => deadline.check_with(|| state.to_string()),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub fn expect_no_io_errors(guest: &mut Guest) {
    let log = guest.check("dmesg", STEP).unwrap();
    let errors: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("I/O error"))
        .collect();
    assert!(errors.is_empty(), "the guest saw errors: {errors:#?}");
}

#[test]
fn pauses_and_hot_plug_lose_nothing() {
    let place = Place::new();
    let under_load = images(&place);
    // These disks are unplugged and plugged in again.
    let leaving = [("leaves", Kind::RAW), ("leaves-too", Kind::QCOW2)]
        .map(|(name, kind)| Image::create(place.path(name), kind, 64 * MIB));
    let serve = |image: &Image| image.serve(&place, name(image), &["--queues", "2"]);
    let all = || under_load.iter().chain(&leaving);
    let servers: Vec<Server> = all().map(serve).collect();
    let disks = all().zip(&servers);
    let disks = disks.map(|(image, server)| Disk::vhost_user(name(image), server.socket()));
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: disks.collect(),
        ..Machine::default()
    })
    .unwrap();

    let load = start_load(&mut guest, &under_load, 12 * MIB);
    for _ in 0..8 {
        guest.qmp("stop", json!({})).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        guest.qmp("cont", json!({})).unwrap();
        std::thread::sleep(Duration::from_millis(150));
    }

    // The other disks are unplugged and plugged in while the first ones are under load.
    for (index, image) in leaving.iter().enumerate() {
        let slot = FIRST_SLOT + under_load.len() + index;
        leave_and_return(
            &mut guest,
            image,
            servers[under_load.len() + index].socket(),
            slot,
        );
    }

    let written = load.finish(&mut guest);
    expect_no_io_errors(&mut guest);
    guest.power_off().unwrap();
    for server in servers {
        server.stop().unwrap();
    }
    verify(&under_load, &written);
    leaving.iter().for_each(Image::check_clean);
}

/// The PCI slot of the first disk.
const FIRST_SLOT: usize = 4;

/// Unplugs a disk and plugs it in again, twice. The disk has its data each time.
fn leave_and_return(guest: &mut Guest, image: &Image, socket: &Path, slot: usize) {
    let name = name(image);
    let device = guest.device(name).unwrap();
    let write = format!("yes {name} | dd of={device} bs=4k count=256 conv=fsync");
    guest.check(&write, STEP).unwrap();
    for _ in 0..2 {
        unplug(guest, name, slot);
        // No program has the image open now.
        image.check_clean();
        plug(guest, name, socket, slot);
        let device = guest.device(name).unwrap();
        let count = format!("dd if={device} bs=4k count=256 2>/dev/null | grep -c '^{name}$'");
        let lines: u64 = guest.check(&count, STEP).unwrap().trim().parse().unwrap();
        let expected = MIB / (name.len() as u64 + 1);
        assert!(
            lines >= expected,
            "{name} came back without its data: {lines} lines of {expected}"
        );
    }
}

pub fn unplug(guest: &mut Guest, id: &str, slot: usize) {
    guest.qmp("device_del", json!({"id": id})).unwrap();
    while guest.wait_event("DEVICE_DELETED", STEP).unwrap()["device"] != id {}
    let gone = format!(
        "for i in $(seq 600); do
             ls -d /sys/bus/pci/devices/*:{slot:02x}.0 >/dev/null 2>&1 || exit 0
             sleep 0.1
         done
         exit 1"
    );
    guest.check(&gone, STEP).unwrap();
    let socket = format!("{id}-socket");
    guest.qmp("chardev-remove", json!({"id": socket})).unwrap();
}

pub fn plug(guest: &mut Guest, id: &str, path: &Path, slot: usize) {
    let socket = format!("{id}-socket");
    let address = json!({"type": "unix", "data": {"path": path}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
    guest
        .qmp("chardev-add", json!({"id": socket, "backend": backend}))
        .unwrap();
    let device = json!({
        "driver": "vhost-user-blk-pci", "id": id, "chardev": socket, "addr": format!("{slot:x}")
    });
    guest.qmp("device_add", device).unwrap();
}
