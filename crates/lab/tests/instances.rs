//! Our small user space in a container and in user-mode Linux, and libguestfs's own, for real:
//! scripts, disks, what is sent in, flushes, and that nothing is left of it.

use parking_lot::Mutex;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_lab::Error;
use fathom_lab::instance::{Cache, Instance, Kind, Spec, check_cpu};
use fathom_testing::Deadline;
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(180);
const MIB: u64 = 1 << 20;

/// A disk with an ext2 file system.
struct Disk {
    _dir: TempDir,
    image: PathBuf,
}

impl Disk {
    fn new() -> Disk {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = dir.path().join("disk.img");
        let file = fs::File::create(&image).unwrap();
        file.set_len(16 * MIB).unwrap();
        let name = image.to_string_lossy();
        fathom_lab::run("mke2fs", &["-q", "-F", "-t", "ext2", &name]).unwrap();
        file.sync_all().unwrap();
        Disk { _dir: dir, image }
    }

    /// Whether the disk has a file with this checksum, as debugfs reads it.
    fn holds(&self, path: &str, sum: &str) {
        let copy = self.image.with_extension("copy");
        let command = format!("dump {path} {}", copy.display());
        let image = self.image.to_string_lossy();
        fathom_lab::run("debugfs", &["-R", &command, &image]).unwrap();
        let found = fathom_lab::run("sha256sum", &[&copy.to_string_lossy()]).unwrap();
        assert_eq!(found.split(' ').next(), sum.split(' ').next());
    }
}

/// Returns the ids of all processes, with their command lines.
fn processes() -> Vec<(u32, String)> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let line = |pid: u32| {
        Some((
            pid,
            fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?,
        ))
    };
    pids.filter_map(line).collect()
}

/// Loop devices over an image.
fn loops(image: &Path) -> usize {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let backing = |path: PathBuf| fs::read_to_string(path.join("loop/backing_file")).ok();
    let files = devices.filter_map(|device| backing(device.path()));
    files
        .filter(|file| file.trim() == image.to_string_lossy())
        .count()
}

/// Waits until all that is known to belong to an instance is gone.
fn wait_gone(pid: u32, image: &Path) {
    let deadline = Deadline::new("the end of an instance's processes and loop devices");
    let needle = image.to_string_lossy();
    loop {
        let left = processes().into_iter();
        let left: Vec<_> = { left }
            .filter(|(one, line)| *one == pid || line.contains(&*needle))
            .collect();
        if left.is_empty() && loops(image) == 0 {
            return;
        }
        deadline.check_with(|| format!("{left:?}"));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Scripts, their failures, the disk, and what is sent in; then its end.
fn works(kind: Kind, cache: Cache) {
    let disk = Disk::new();
    let spec = Spec {
        cache,
        ..Spec::new(&disk.image)
    };
    let mut instance = Instance::start(kind, &spec).unwrap();
    let pid = instance.pid();
    assert_eq!(
        instance.check("echo one; echo two >&2", SOON).unwrap(),
        "one\ntwo\n"
    );
    let failed = instance.check("echo the reason; false; echo not reached", SOON);
    let failed = failed.unwrap_err();
    assert!(matches!(failed, Error::Guest { status: 1, .. }), "{failed}");
    assert!(failed.to_string().contains("the reason"), "{failed}");

    let device = instance.disk().to_owned();
    instance
        .check(&format!("mount {device} /mnt"), SOON)
        .unwrap();
    let script = "dd of=/mnt/file bs=64k iflag=fullblock count=32 conv=fsync 2>/dev/null
                  sha256sum /mnt/file; wc -c </mnt/file";
    let said = instance.upload(2, script, SOON).unwrap();
    assert!(said.ends_with(&format!("{}\n", 2 * MIB)), "{said}");
    // The way in is as it was.
    let again = instance
        .upload(2, "head -c 2097152 | sha256sum", SOON)
        .unwrap();
    assert_eq!(again.split(' ').next(), said.split(' ').next());
    instance.check("umount /mnt", SOON).unwrap();
    instance.end().unwrap();
    disk.holds("/file", &said);
    wait_gone(pid, &disk.image);
}

#[test]
fn this_machine_has_a_disk_and_is_left_as_it_was() {
    works(Kind::Bare, Cache::Writeback);
}

#[test]
fn a_container_has_a_disk_and_ends_without_traces() {
    works(Kind::Container, Cache::None);
}

#[test]
fn user_mode_linux_has_a_disk_and_ends_without_traces() {
    match check_cpu() {
        Ok(()) => works(Kind::Uml, Cache::Writeback),
        // User-mode Linux panics at its first process, and the error names the cause.
        Err(refused) => {
            let disk = Disk::new();
            let error = Instance::start(Kind::Uml, &Spec::new(&disk.image)).unwrap_err();
            assert_eq!(error.to_string(), refused.to_string());
        }
    }
}

#[test]
fn an_appliance_of_libguestfs_has_a_disk_where_one_can_be_made() {
    match fathom_lab::program("guestfish") {
        Ok(_) => works(Kind::Libguestfs, Cache::Writeback),
        // libguestfs is a large package that may be missing, and the error names the package.
        Err(_) => {
            let disk = Disk::new();
            let error = Instance::start(Kind::Libguestfs, &Spec::new(&disk.image));
            let error = error.unwrap_err().to_string();
            assert!(error.contains("install libguestfs"), "{error}");
        }
    }
}

/// Held by tests that create control groups. A test can check that no group is left only while no
/// other test has groups.
static GROUPS: Mutex<()> = Mutex::new(());

#[test]
fn nothing_is_left_of_what_is_killed() {
    let _groups = GROUPS.lock();
    let uml = check_cpu().is_ok().then_some(Kind::Uml);
    for kind in [Kind::Container].into_iter().chain(uml) {
        let disk = Disk::new();
        let spec = Spec {
            memory: Some(128 * MIB),
            ..Spec::new(&disk.image)
        };
        let mut instance = Instance::start(kind, &spec).unwrap();
        let pid = instance.pid();
        let mount = format!("mount {} /mnt; sleep 1000 & cd /mnt", instance.disk());
        instance.check(&mount, SOON).unwrap();
        drop(instance);
        wait_gone(pid, &disk.image);
        // The file system was not unmounted, but no process uses the image any more.
        let file = fs::File::options().write(true).open(&disk.image).unwrap();
        file.write_all_at(&[0; 512], 0).unwrap();
    }
    let own = format!("fathom-scratch-{}-*", std::process::id());
    let find = ["/sys/fs/cgroup", "-maxdepth", "2", "-name", &own];
    let deadline = Deadline::new("the end of all control groups");
    loop {
        let groups = fathom_lab::run("find", &find).unwrap();
        if groups.is_empty() {
            return;
        }
        deadline.check_with(|| groups);
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_container_has_the_limits_that_it_is_given() {
    let _groups = GROUPS.lock();
    let disk = Disk::new();
    let spec = Spec {
        memory: Some(64 * MIB),
        cpus: Some(0.1),
        ..Spec::new(&disk.image)
    };
    let mut instance = Instance::start(Kind::Container, &spec).unwrap();
    // The memory limit: the kernel kills a process that needs more.
    let greedy = instance.check("dd if=/dev/zero of=/dev/null bs=128M count=1", SOON);
    let error = greedy.unwrap_err();
    assert!(matches!(error, Error::Guest { .. }), "{error}");
    // The CPU limit: the kernel throttles a container that has used its share.
    let spin = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done";
    instance.check(spin, SOON).unwrap();
    let own = format!("fathom-scratch-{}-*", std::process::id());
    let find = ["/sys/fs/cgroup", "-path", &format!("*/{own}/cpu.stat")];
    let stats = fathom_lab::run("find", &find).unwrap();
    let mut texts = stats
        .lines()
        .filter_map(|path| fs::read_to_string(path).ok());
    let throttled = |text: String| {
        let mut words = text
            .lines()
            .filter_map(|line| line.strip_prefix("nr_throttled "));
        words.any(|count| count != "0")
    };
    assert!(texts.any(throttled), "{stats}");
    instance.end().unwrap();
}
