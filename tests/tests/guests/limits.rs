//! Tests mistakes of users, and what hosts do to a disk.
//!
//! Each time there is one clear error, and a running guest continues.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_lab::{Disk, Guest, Machine, Server, program};
use fathom_testing::{Deadline, PATIENCE, until};
use fathom_tests::image::{Image, Kind};
use fathom_tests::{Ended, Place, fathom, run, run_command};

const MIB: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_secs(120);

fn serve(place: &Place, image: &str, args: &[&str]) -> Ended {
    let socket = place.sockets().join("refused.sock");
    let socket = socket.to_string_lossy();
    run(
        &[&["serve", image, "--vhost-user", &socket], args].concat(),
        SOON,
    )
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[test]
fn images_that_cannot_be_served_are_refused() {
    let place = Place::new();
    let missing = text(&place.path("missing.img"));
    serve(&place, &missing, &[]).refused_with(&["missing.img", "no such file"]);

    let short = text(&place.image("short.img", 511));
    serve(&place, &short, &[]).refused_with(&["short.img", "512"]);

    let empty = text(&place.image("empty.img", 0));
    serve(&place, &empty, &[]).refused_with(&["empty.img"]);

    let dir = place.path("dir");
    fs::create_dir(&dir).unwrap();
    serve(&place, &text(&dir), &[]).refused_with(&["dir", "directory"]);

    for (name, size) in [("memory:", "memory:"), ("null:12x", "12x")] {
        let ended = serve(&place, name, &[]);
        assert!(
            matches!(ended.code, Some(1..)) && ended.stderr.contains(size),
            "{ended:?}"
        );
    }
}

#[test]
fn image_that_ends_within_a_sector_is_served_read_only() {
    let place = Place::new();
    let image = place.image("odd.img", MIB + 100);
    serve(&place, &text(&image), &[]).refused_with(&[
        "odd.img",
        "not a multiple of 512",
        "truncate",
    ]);
    place.serve("odd", &image, &["--readonly"]).stop().unwrap();
}

/// A guest that writes a qcow2 header to its raw disk must not gain a backing file of its choice.
///
/// Formats are therefore not probed, and the server demands `--format` for such an image.
#[test]
fn a_known_magic_asks_for_the_format() {
    let place = Place::new();
    let image = text(&place.path("disk.qcow2"));
    fathom_lab::run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "16M"]).unwrap();
    serve(&place, &image, &[]).refused_with(&["disk.qcow2", "qcow2", "--format"]);
    // With `--format raw`, the image is raw. The file ends within a sector, so the disk can only be
    // read.
    place
        .serve("raw", Path::new(&image), &["--format", "raw", "--readonly"])
        .stop()
        .unwrap();
}

#[test]
fn an_image_without_permission_is_refused() {
    let place = Place::new();
    let image = place.image("secret.img", MIB);
    fs::set_permissions(&image, Permissions::from_mode(0o000)).unwrap();
    let socket = place.sockets().join("refused.sock");
    let mut command = if is_root() {
        as_nobody(&place)
    } else {
        Command::new(fathom())
    };
    command
        .arg("serve")
        .arg(&image)
        .arg("--vhost-user")
        .arg(&socket);
    run_command(command, SOON).refused_with(&["secret.img", "no permission to read"]);
}

fn is_root() -> bool {
    fathom_lab::run("id", &["-u"]).unwrap().trim() == "0"
}

/// Returns a command that runs a copy of the program as the user `nobody`, because root may open
/// everything.
///
/// The original is in a place that this user cannot reach.
fn as_nobody(place: &Place) -> Command {
    let copy = place.sockets().join("fathom");
    // Another process writes the copy. If this process had it open for writing, children of other
    // tests would inherit it until they call exec, and until then it could not be executed.
    fathom_lab::run("cp", &[&text(&fathom()), &text(&copy)]).unwrap();
    for path in [copy.as_path(), place.sockets()] {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let mut command = Command::new(program("setpriv").unwrap());
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(copy);
    command
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    let place = Place::new();
    let image = text(&place.image("disk.img", MIB));
    for (args, word) in [
        (vec!["--aio", "fast"], "fast"),
        (vec!["--cache", "maybe"], "maybe"),
        (vec!["--queues", "0"], "queues"),
        (vec!["--iothreads", "0"], "iothreads"),
        (vec!["--cpus", "99999"], "99999"),
        (vec!["--poll", "often"], "often"),
        (vec!["--no-such-option"], "--no-such-option"),
        (vec!["--aio", "native", "--cache", "writeback"], "native"),
        (
            vec!["--serial", "a serial number of more than 20 bytes"],
            "serial",
        ),
    ] {
        let ended = serve(&place, &image, &args);
        assert!(matches!(ended.code, Some(1..)), "{args:?}: {ended:?}");
        assert!(
            ended.stderr.contains(word),
            "{args:?} must be named: {}",
            ended.stderr
        );
    }
    let ended = run(&["stats", "/nonexistent/control"], SOON);
    ended.refused_with(&["/nonexistent/control"]);
    run(&["trace", "/nonexistent/trace"], SOON).refused_with(&["/nonexistent/trace"]);
}

#[test]
fn a_socket_of_a_living_server_is_not_taken() {
    let place = Place::new();
    let image = place.image("disk.img", MIB);
    let server = place.serve("first", &image, &["--readonly"]);
    let socket = text(server.socket());
    let second = run(&["serve", "null:1M", "--vhost-user", &socket], SOON);
    second.refused_with(&["first.sock", "in use by fathom"]);
    // The first server still has the socket.
    assert!(Path::new(&socket).exists());
    server.stop().unwrap();

    let file = place.path("precious");
    fs::write(&file, "no socket").unwrap();
    let third = run(&["serve", "null:1M", "--vhost-user", &text(&file)], SOON);
    third.refused_with(&["precious", "not a socket"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "no socket");
}

/// An interactive qemu-io that has an image open, and so holds QEMU's locks on it.
struct Holder(Child);

impl Holder {
    fn of(image: &Path) -> Self {
        let mut child = Command::new(program("qemu-io").unwrap())
            .args(["-f", "raw"])
            .arg(image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The prompt appears when the image is open.
        let mut prompt = [0; 8];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut prompt)
            .unwrap();
        assert_eq!(&prompt, b"qemu-io>");
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self
            .0
            .stdin
            .take()
            .map(|mut stdin| stdin.write_all(b"quit\n"));
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn bench(server: &Server, args: &[&str]) -> Ended {
    let socket = text(server.socket());
    run(&[&["bench", "--vhost-user", &socket], args].concat(), STEP)
}

const READ: &[&str] = &[
    "--rw",
    "randread",
    "--bs",
    "4k",
    "--iodepth",
    "1",
    "--runtime",
    "1",
];

#[test]
fn qemu_and_fathom_never_write_one_image_at_once() {
    let place = Place::new();
    let image = place.image("shared.img", 16 * MIB);

    // The server reports the lock at the start and waits for it, like the target of a migration.
    let holder = Holder::of(&image);
    let mut server = place.serve("locked", &image, &[]);
    wait_log(&mut server, "shared.img", "in use");
    drop(holder);
    // The locks are taken when a front-end starts its rings, and not before.
    let holder = Holder::of(&image);
    let refused = bench(&server, READ);
    assert!(
        matches!(refused.code, Some(1..)),
        "served a locked image: {refused:?}"
    );
    wait_log(&mut server, "shared.img", "in use");
    drop(holder);
    // When the image is free again, the same process serves it.
    let ended = bench(&server, READ);
    assert_eq!(ended.code, Some(0), "{ended:?}");

    // The other way round, QEMU is refused while a front-end's rings run.
    let socket = text(server.socket());
    let mut load = Command::new(fathom());
    load.args([
        "bench",
        "--vhost-user",
        &socket,
        "--rw",
        "randread",
        "--runtime",
        "10m",
    ]);
    let mut load = load
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_locks(&mut server);
    let command = ["-f", "raw", "-c", "write 0 4k", &text(&image)];
    let refused = fathom_lab::run("qemu-io", &command)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("lock"), "qemu-io: {refused}");
    load.kill().unwrap();
    load.wait().unwrap();
    server.stop().unwrap();
}

/// Waits until the server holds locks, according to the kernel.
fn wait_locks(server: &mut Server) {
    let files = format!("/proc/{}/fdinfo", server.process().pid());
    until("locks of the image", || {
        let mut infos = fs::read_dir(&files).unwrap().flatten();
        infos.any(|info| fs::read_to_string(info.path()).is_ok_and(|t| t.contains("lock:")))
    });
}

/// Waits for one line of the server's log that has both words.
fn wait_log(server: &mut Server, first: &str, second: &str) {
    let what = format!("a line with '{first}' and '{second}'");
    let deadline = Deadline::new(&what);
    loop {
        let log = server.process().log();
        if log
            .lines()
            .any(|line| line.contains(first) && line.contains(second))
        {
            return;
        }
        deadline.check_with(|| log);
        deadline.pause();
    }
}

/// A small file system: an ext4 image that is mounted with a loop device.
///
/// The test needs the right to mount. A tmpfs in a user namespace would be invisible to the server.
struct SmallFs {
    mount: std::path::PathBuf,
}

impl SmallFs {
    fn new(place: &Place, name: &str) -> Self {
        let image = place.image(&format!("{name}.fs"), 16 * MIB);
        fathom_lab::run(
            "mke2fs",
            &["-q", "-F", "-t", "ext4", "-m", "0", &text(&image)],
        )
        .unwrap();
        let mount = place.path(&format!("{name}.mount"));
        fs::create_dir(&mount).unwrap();
        if let Err(error) = fathom_lab::run("mount", &["-o", "loop", &text(&image), &text(&mount)])
        {
            panic!(
                "this test mounts a small file system and so needs root and loop devices: {error}"
            );
        }
        Self { mount }
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        // The kernel releases the files of a killed server a moment after the process has ended.
        let end = Instant::now() + PATIENCE;
        while let Err(error) = fathom_lab::run("umount", &[&text(&self.mount)]) {
            if Instant::now() > end {
                eprintln!("{error}");
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A disk in a file system that is too small for it.
struct Tight {
    name: &'static str,
    image: Image,
    server: Server,
    /// A file that takes space; removing it frees space.
    ballast: PathBuf,
    /// Unmounted after all fields above have been dropped.
    _fs: SmallFs,
}

impl Tight {
    fn new(place: &Place, name: &'static str, kind: Kind) -> Self {
        let fs = SmallFs::new(place, name);
        let ballast = fs.mount.join("ballast");
        File::create(&ballast)
            .unwrap()
            .write_all(&vec![1; 4 << 20])
            .unwrap();
        let image = Image::create(fs.mount.join(name), kind, 64 * MIB);
        let server = image.serve(place, name, &[]);
        Self {
            name,
            image,
            server,
            ballast,
            _fs: fs,
        }
    }

    /// Fills the file system. The guest's write fails, older data is still read, and writes work
    /// again when there is space, even if another program has freed it.
    fn fill_up(&mut self, guest: &mut Guest) {
        let device = guest.device(self.name).unwrap();
        // Every MiB has other bytes than those before it.
        let numbers = |at: u64| {
            let first = (at + 1) * 100_000_000;
            format!(
                "seq {first} {} | dd of={device} bs=1M seek={at} iflag=fullblock count=2 \
                 conv=fsync 2>&1",
                first + 220_000
            )
        };
        let kept = format!(
            "echo 3 >/proc/sys/vm/drop_caches
             dd if={device} bs=1M count=2 2>/dev/null | sha256sum"
        );
        let fill = format!("dd if=/dev/zero of={device} bs=1M seek=16 count=32 conv=fsync 2>&1");
        guest.check(&numbers(0), STEP).unwrap();
        let expected = guest.check(&kept, STEP).unwrap();
        for round in 0..2 {
            let output = guest.run(&fill, STEP).unwrap();
            assert!(
                output.status != 0 && output.text.contains("error"),
                "{}: {output:?}",
                self.name
            );
            wait_log(&mut self.server, self.name, "no space left");
            self.image.check_consistent();
            assert_eq!(guest.check(&kept, STEP).unwrap(), expected, "{}", self.name);
            if round == 0 {
                fs::remove_file(&self.ballast).unwrap();
                guest.check(&numbers(4), STEP).unwrap();
            }
        }
        let rest = format!("/usr/bin/blkdiscard -f -o {} {device}", 16 * MIB);
        guest.check(&rest, STEP).unwrap();
        guest.check(&numbers(8), STEP).unwrap();
        assert_eq!(guest.check(&kept, STEP).unwrap(), expected, "{}", self.name);
    }
}

#[test]
fn a_guest_survives_what_happens_to_its_images() {
    let place = Place::new();
    let mut tight = [
        Tight::new(&place, "full", Kind::RAW),
        Tight::new(&place, "full-qcow2", Kind::QCOW2),
        Tight::new(&place, "full-small", Kind::QCOW2_SMALL),
        Tight::new(&place, "full-qed", Kind::QED),
    ];
    let truncated = place.image("truncated.img", 16 * MIB);
    let removed = place.image("removed.img", 16 * MIB);
    for image in [&truncated, &removed] {
        let file = OpenOptions::new().write(true).open(image).unwrap();
        file.write_all_at(&vec![0x5a; 16 << 20], 0).unwrap();
    }
    let mut servers = [("truncated", &truncated), ("removed", &removed)]
        .map(|(name, image)| place.serve(name, image, &[]));
    let disks = tight.iter().map(|tight| (tight.name, &tight.server));
    let disks = disks.chain(["truncated", "removed"].into_iter().zip(&servers));
    let disks = disks
        .map(|(name, server)| Disk::vhost_user(name, server.socket()))
        .collect();
    let mut guest = Guest::boot(&Machine {
        disks,
        ..Machine::default()
    })
    .unwrap();

    for tight in &mut tight {
        tight.fill_up(&mut guest);
    }

    // The image is truncated while it is served: reads of the missing part fail, and the rest is
    // served.
    let device = guest.device("truncated").unwrap();
    OpenOptions::new()
        .write(true)
        .open(&truncated)
        .unwrap()
        .set_len(8 * MIB)
        .unwrap();
    let output = guest.run(&read(&device, 12), STEP).unwrap();
    assert!(
        output.status != 0,
        "reading past the end of the file must fail: {output:?}"
    );
    wait_log(
        &mut servers[0],
        "truncated.img",
        "the file ends at 8388608 bytes, the disk at 16777216",
    );
    guest.check(&read(&device, 4), STEP).unwrap();

    // The image is removed while it is served: the open file is still the disk.
    let device = guest.device("removed").unwrap();
    fs::remove_file(&removed).unwrap();
    guest.check(&read(&device, 4), STEP).unwrap();
    guest
        .check(
            &format!("dd if=/dev/zero of={device} bs=1M count=4 conv=fsync 2>&1"),
            STEP,
        )
        .unwrap();

    guest.power_off().unwrap();
    for server in servers {
        server.stop().unwrap();
    }
    for Tight {
        image, server, _fs, ..
    } in tight
    {
        server.stop().unwrap();
        image.check_clean();
    }
}

/// Reads one MiB at `mib` from the disk itself, not from the guest's cache.
fn read(device: &str, mib: u64) -> String {
    format!(
        "echo 3 >/proc/sys/vm/drop_caches
         dd if={device} of=/dev/null bs=1M skip={mib} count=1 2>&1"
    )
}
