//! Checks mirrors whose target does not respond: a forced stop ends them at once, and their server
//! can end, too.

use crate::driver::{Driver, MAX_LEN, Request, with_disk};
use crate::exercise::differ;
use crate::kinds::{SIZE, qemu_img};
use crate::mirror::{await_phase, complete, flat, mirror, start};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, listens, refused, stdout_of};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

const MIB: usize = 1 << 20;

fn image(dir: &Path) -> String {
    let image = dir.join("image");
    let bytes: Vec<_> = (0..SIZE).map(|n| (n / 512 % 251) as u8 + 1).collect();
    fs::write(&image, bytes).unwrap();
    as_arg(&image)
}

/// Starts qemu-nbd with a new disk. Returns the process and the URI of the disk.
fn target(dir: &Path) -> (Kept, String) {
    let (file, socket) = (as_arg(&dir.join("target")), dir.join("n"));
    let _ = fs::remove_file(&socket);
    qemu_img(
        dir,
        &["create", "-q", "-f", "raw", &file, &SIZE.to_string()],
    );
    let mut nbd = Command::new("qemu-nbd");
    nbd.args(["-t", "-f", "raw", "-x", "e", "-k"]).arg(&socket);
    let nbd = Kept::spawn(nbd.arg(&file).stderr(Stdio::null()));
    eventually("the target is there", || listens(&socket).then_some(()));
    (nbd, format!("nbd+unix:///e?socket={}", as_arg(&socket)))
}

/// Checks that the target has some sectors of the image, and nothing else.
fn has_a_part(dir: &Path) {
    let [image, target] = ["image", "target"].map(|name| fs::read(dir.join(name)).unwrap());
    assert_eq!(image.len(), target.len());
    let sectors = || image.chunks(512).zip(target.chunks(512));
    assert!(sectors().all(|(one, other)| one == other || other == [0; 512]));
    let is_same = |(one, other): &(&[u8], &[u8])| one == other;
    let copied = sectors().filter(is_same).count();
    assert!((1..sectors().count()).contains(&copied), "{copied}");
}

fn copied(served: &Served) -> u64 {
    mirror(served)["copied"].as_u64().unwrap()
}

/// Starts a mirror, and calls `stop`, after which the target must not respond any more.
fn begin_stuck(served: &Served, target: &str, stop: impl FnOnce()) {
    start(served, target, &["-O", "raw", "--speed", "4M"]);
    eventually("something is copied", || (copied(served) > 0).then_some(()));
    stop();
    eventually("nothing is copied any more", || {
        let before = copied(served);
        thread::sleep(Duration::from_millis(700));
        (copied(served) == before).then_some(())
    });
    assert_eq!(mirror(served)["phase"], "copying");
}

fn write(disk: &mut Driver<'_>, model: &mut [u8], at: usize, byte: u8) {
    let data = vec![byte; MAX_LEN];
    model[at..at + MAX_LEN].fill(byte);
    let offset = at as u64;
    assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
}

#[test]
fn mirror_to_an_unresponsive_server_can_be_forced_to_stop() {
    for signal in ["KILL", "STOP"] {
        eprintln!("{signal}");
        let dir = disk_dir();
        let dir = dir.path();
        let mut served = Served::start(&image(dir), &["--sandbox", "off"]);
        let (nbd, uri) = target(dir);
        begin_stuck(&served, &uri, || nbd.signal(signal));
        stdout_of(&["mirror", "stop", &served.api(), "--force"]);
        refused(1, &["mirror", "show", &served.api()], &["no mirror"]);
        // Pending writes are not made any more, even if the target's server resumes.
        nbd.signal("CONT");
        drop(nbd);
        has_a_part(dir);
        let (_nbd, uri) = target(dir);
        start(&served, &uri, &["-O", "raw"]);
        await_phase(&served, "ready");
        stdout_of(&["mirror", "stop", &served.api()]);
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    }
}

#[test]
fn server_ends_in_time_while_a_mirrors_target_hangs() {
    for signal in ["KILL", "STOP"] {
        eprintln!("{signal}");
        let dir = disk_dir();
        let dir = dir.path();
        let mut served = Served::start(&image(dir), &["--sandbox", "off"]);
        let (nbd, uri) = target(dir);
        begin_stuck(&served, &uri, || nbd.signal(signal));
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert!(!served.log().contains("abandoned"), "{}", served.log());
        nbd.signal("CONT");
    }
}

/// A file system on a loop device. Writes to it hang while it is frozen.
pub struct FileSystem(pub String);

impl FileSystem {
    pub fn new(dir: &Path) -> FileSystem {
        let (file, place) = (dir.join("fs"), dir.join("mounted"));
        fs::File::create(&file).unwrap().set_len(96 << 20).unwrap();
        fs::create_dir(&place).unwrap();
        let (file, place) = (as_arg(&file), as_arg(&place));
        succeeds("mkfs.ext4", &["-q", &file]);
        succeeds("mount", &["-o", "loop", &file, &place]);
        FileSystem(place)
    }

    pub fn freeze(&self) {
        succeeds("fsfreeze", &["--freeze", &self.0]);
    }

    pub fn thaw(&self) {
        succeeds("fsfreeze", &["--unfreeze", &self.0]);
    }
}

/// Thaws a file system when dropped, because a process that waits for a frozen one cannot be
/// killed.
pub struct ThawOnDrop<'a>(pub &'a FileSystem);

impl Drop for ThawOnDrop<'_> {
    fn drop(&mut self) {
        // (The file system may be thawed already.)
        let place = &self.0.0;
        let thaw = Command::new("fsfreeze")
            .args(["--unfreeze", place])
            .output();
        drop(thaw);
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        drop(ThawOnDrop(self));
        let unmount = Command::new("umount").args(["--lazy", &self.0]).output();
        drop(unmount);
    }
}

fn succeeds(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
}

/// The thread that waits for the target stays behind. The end of this thread must not affect the
/// next mirror.
#[test]
fn forced_stop_of_a_mirror_to_a_file_system_that_hangs_succeeds() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = image(dir);
    let mut model = fs::read(&image).unwrap();
    let mut served = Served::start(&image, &["--sandbox", "off"]);
    let hangs = FileSystem::new(dir);
    let target = format!("{}/target", hangs.0);
    qemu_img(
        dir,
        &["create", "-q", "-f", "raw", &target, &SIZE.to_string()],
    );
    let other = as_arg(&dir.join("other"));
    qemu_img(
        dir,
        &["create", "-q", "-f", "raw", &other, &SIZE.to_string()],
    );
    with_disk(&served.arg("s"), 1, |disk| {
        begin_stuck(&served, &target, || hangs.freeze());
        write(disk, &mut model, 0, 201);
        stdout_of(&["mirror", "stop", &served.api(), "--force"]);
        refused(1, &["mirror", "show", &served.api()], &["no mirror"]);
        write(disk, &mut model, MIB, 202);
        start(&served, &other, &["-O", "raw"]);
        await_phase(&served, "ready");
        write(disk, &mut model, 2 * MIB, 203);
        hangs.thaw();
        eventually("the other file is free again", || {
            let args = ["-f", "raw", "-c", "write 0 512", &target];
            let used = Command::new("qemu-io").args(args).output().unwrap();
            used.status.success().then_some(())
        });
        for n in 3..6 {
            write(disk, &mut model, n * MIB, 204);
        }
        complete(&served, &["--transient"]);
        write(disk, &mut model, 7 * MIB, 205);
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(differ(&flat(dir, "raw", &other), &model), None);
}
