//! Tests of the mail server on real file systems.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_load::Error;
use fathom_load::files::{Options, Part, Report, Weights, run};
use tempfile::TempDir;

/// Returns the options of a small run, which is limited by a number of operations and does not use
/// O_DIRECT.
fn small(dir: &Path) -> Options {
    Options {
        threads: 3,
        files: 200,
        dirs: 6,
        max_size: 128 << 10,
        runtime: None,
        number_ios: Some(200),
        direct: false,
        verify: true,
        ..Options::new(dir)
    }
}

fn start(options: &Options) -> Result<Report, Error> {
    run(options, &mut |_| {})
}

/// Creates a directory in memory.
fn tmpfs() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Creates a directory on a disk.
fn disk() -> TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// Returns the contents of all files, by path.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => drop(found.insert(path.clone(), fs::read(&path).unwrap())),
        }
    }
    found
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

/// Returns any file that the run has created.
fn some_file(root: &Path) -> Option<PathBuf> {
    let below = |dir: &Path| fs::read_dir(dir).ok()?.flatten().next().map(|e| e.path());
    let dirs = fs::read_dir(below(root)?).ok()?.flatten();
    dirs.filter_map(|dir| below(&dir.path())).next()
}

#[test]
fn a_seed_leaves_the_same_files_again_and_another_others() {
    for verify in [false, true] {
        let tree = |seed| {
            let dir = tmpfs();
            let options = Options {
                seed,
                verify,
                keep: true,
                ..small(dir.path())
            };
            let kept = start(&options).unwrap().kept.unwrap();
            let files = contents(&kept).into_iter();
            files
                .map(|(path, data)| (path.strip_prefix(&kept).unwrap().to_owned(), data))
                .collect::<BTreeMap<_, _>>()
        };
        let first = tree(1);
        assert!(first.len() > 100);
        assert!(first == tree(1), "verify {verify}");
        assert!(first != tree(2), "verify {verify}");
    }
}

#[test]
fn a_run_in_two_parts_is_the_same_run() {
    let leaves = |kept: &Path| -> Vec<Vec<u8>> { contents(kept).into_values().collect() };
    let whole = tmpfs();
    let keep = Options {
        keep: true,
        ..small(whole.path())
    };
    let expected = leaves(&start(&keep).unwrap().kept.unwrap());

    let dir = tmpfs();
    let files = Options {
        part: Part::Files,
        ..small(dir.path())
    };
    let made = start(&files).unwrap();
    assert!(
        made.operations.is_empty() && made.prepare.is_some(),
        "{made:?}"
    );
    let root = made.kept.unwrap();
    assert_eq!(contents(&root).len(), 200);
    let load = |keep| Options {
        part: Part::Load,
        keep,
        ..small(&root)
    };
    let loaded = start(&load(true)).unwrap();
    assert_eq!(loaded.operations.iter().map(|o| o.ops).sum::<u64>(), 600);
    assert_eq!(loaded.prepare, None);
    assert!(leaves(&root) == expected);
    fs::remove_dir_all(&root).unwrap();
    let root = start(&files).unwrap().kept.unwrap();
    start(&Options {
        dir: root,
        ..load(false)
    })
    .unwrap();
    assert!(is_empty(dir.path()), "it takes away what it was given");

    // A directory that no run has created is rejected, and is not removed.
    let other = tmpfs();
    fs::create_dir(other.path().join("d000")).unwrap();
    let strange = Options {
        part: Part::Load,
        ..small(other.path())
    };
    let error = start(&strange).unwrap_err().to_string();
    assert!(
        error.contains("d001") && error.contains("--prepare-only"),
        "{error}"
    );
    assert!(other.path().join("d000").exists());
}

#[test]
fn direct_io_on_a_disk_does_every_operation_and_verifies() {
    let dir = disk();
    let options = Options {
        direct: true,
        fsync: 5,
        ..small(dir.path())
    };
    let report = start(&options).expect("a file system in /var/tmp that has O_DIRECT");
    for op in ["create", "delete", "open", "read", "append"] {
        let found = report.operation(op).unwrap();
        assert!(found.ops > 0 && found.latency.mean_ns > 0.0, "{op}");
    }
    assert_eq!(report.operations.iter().map(|o| o.ops).sum::<u64>(), 600);
    assert!(report.sync.unwrap() <= report.runtime);
    assert!(report.verify.unwrap().checked > 200);
    assert!(is_empty(dir.path()));
}

#[test]
fn a_run_by_time_ends_and_leaves_nothing() {
    let dir = tmpfs();
    let mut calls = 0;
    let options = Options {
        runtime: Some(Duration::from_millis(1200)),
        number_ios: None,
        ..small(dir.path())
    };
    let report = run(&options, &mut |p| calls += u32::from(p.completed > 0)).unwrap();
    assert!(report.runtime >= 1.2, "{}", report.runtime);
    assert!(calls > 0);
    assert!(report.iops > 0.0 && report.mb_per_s > 0.0);
    assert!(is_empty(dir.path()));
}

#[test]
fn a_stop_ends_it_early_with_what_was_measured() {
    let dir = tmpfs();
    let options = Options {
        runtime: Some(Duration::from_secs(600)),
        number_ios: None,
        ..small(dir.path())
    };
    let stop = options.stop.clone();
    let report = run(&options, &mut |_| stop.store(true, Ordering::Relaxed)).unwrap();
    assert!(report.runtime < 60.0 && report.iops > 0.0);
    assert!(report.verify.unwrap().checked > 0);
    // The run was stopped before there was anything to measure.
    let report = start(&options).unwrap();
    assert!(report.operations.is_empty());
    assert!(is_empty(dir.path()));
}

#[test]
fn a_directory_that_cannot_be_written_to_is_an_error() {
    let error = start(&small(Path::new("/proc"))).unwrap_err().to_string();
    assert!(
        error.contains("cannot make a directory in /proc"),
        "{error}"
    );
    let dir = tmpfs();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = start(&small(&file)).unwrap_err().to_string();
    assert!(
        error.contains("cannot open") && error.contains("file"),
        "{error}"
    );
    // Root can write to the directory regardless of its mode.
    if !rustix::process::geteuid().is_root() {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o500)).unwrap();
        let error = start(&small(dir.path())).unwrap_err().to_string();
        assert!(error.contains("permission denied"), "{error}");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    }
}

/// A tmpfs mount that is unmounted on drop.
struct Mount(TempDir);

impl Mount {
    fn tmpfs(options: &str) -> Mount {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(dir.path());
        let mounted = mount.status().is_ok_and(|status| status.success());
        assert!(mounted, "this test mounts a file system: run it as root");
        Mount(dir)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn full_file_system_is_reported_and_cleaned() {
    let mount = Mount::tmpfs("size=24m");
    let dir = mount.0.path();
    // The initial files fit, and the load creates more of them.
    let options = Options {
        files: 400,
        max_size: 1 << 20,
        number_ios: Some(100_000),
        weights: Weights([1, 0, 0, 0, 0]),
        verify: false,
        ..small(dir)
    };
    match start(&options) {
        Err(Error::Full(text)) => {
            assert!(
                text.contains("no space left") && text.contains("/d00"),
                "{text}"
            );
            assert!(text.contains("--scale"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert!(is_empty(dir));
    // Files that do not fit are rejected before any file is created.
    match start(&Options {
        files: 2000,
        ..options
    }) {
        Err(Error::Full(text)) => assert!(text.contains("has room for"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(is_empty(dir));
}

#[test]
fn too_few_inodes_are_seen_before_the_run() {
    let mount = Mount::tmpfs("size=1g,nr_inodes=100");
    let error = start(&small(mount.0.path())).unwrap_err();
    assert!(matches!(error, Error::Full(_)), "{error}");
}

#[test]
fn a_read_only_mount_is_an_error() {
    let mount = Mount::tmpfs("size=1m,ro");
    let error = start(&small(mount.0.path())).unwrap_err().to_string();
    assert!(error.contains("read-only file system"), "{error}");
}

/// Runs a load while `meddle` changes its files, and returns the error.
fn meddled(options: &Options, mut meddle: impl FnMut()) -> Error {
    let options = Options {
        runtime: Some(Duration::from_secs(60)),
        number_ios: None,
        ..options.clone()
    };
    run(&options, &mut |_| meddle()).unwrap_err()
}

#[test]
fn a_file_that_somebody_removes_is_named() {
    let dir = tmpfs();
    let mut removed = Vec::new();
    let error = meddled(&small(dir.path()), || {
        for dir in fs::read_dir(some_file(dir.path()).unwrap().parent().unwrap()).unwrap() {
            let path = dir.unwrap().path();
            if fs::remove_file(&path).is_ok() {
                removed.push(path.display().to_string());
            }
        }
    });
    assert!(matches!(error, Error::Changed(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("another program has removed it"), "{text}");
    assert!(removed.iter().any(|path| text.contains(path)), "{text}");
    assert!(is_empty(dir.path()));
}

#[test]
fn a_file_that_somebody_shortens_or_writes_to_is_named() {
    for shorten in [true, false] {
        let dir = tmpfs();
        // Only read: otherwise the load might delete the changed file or append to it.
        let options = Options {
            weights: "read=1".parse().unwrap(),
            ..small(dir.path())
        };
        let error = meddled(&options, || {
            let file = some_file(dir.path()).unwrap();
            let file = fs::OpenOptions::new().write(true).open(file).unwrap();
            let len = file.metadata().unwrap().len();
            match shorten {
                true => file.set_len(0).unwrap(),
                false => file.write_all_at(&vec![0; len as usize], 0).unwrap(),
            }
        });
        let problem = ["found zeroes", "fewer bytes"][usize::from(shorten)];
        assert!(error.to_string().contains(problem), "{error}");
        assert!(is_empty(dir.path()));
    }
}

#[test]
fn links_out_of_the_directory_are_not_followed() {
    let outside = tmpfs();
    let precious = outside.path().join("f00000000");
    fs::write(&precious, vec![1; 1 << 20]).unwrap();
    // First case: a link in place of a file.
    let dir = tmpfs();
    let options = Options {
        weights: "read=1".parse().unwrap(),
        ..small(dir.path())
    };
    let mut meddled_with = None;
    let error = meddled(&options, || {
        meddled_with.get_or_insert_with(|| {
            let file = some_file(dir.path()).unwrap();
            fs::remove_file(&file).unwrap();
            symlink(&precious, &file).unwrap();
            file
        });
    });
    let name = meddled_with.unwrap().display().to_string();
    let text = error.to_string();
    assert!(
        text.contains("symbolic links") && text.contains(&name),
        "{text}"
    );
    assert!(is_empty(dir.path()));
    // Second case: a link in place of a directory, whose files would be removed at the end.
    let options = Options {
        runtime: Some(Duration::from_millis(700)),
        number_ios: None,
        ..small(dir.path())
    };
    let mut is_done = false;
    let error = run(&options, &mut |_| {
        if !std::mem::replace(&mut is_done, true) {
            let moved = some_file(dir.path()).unwrap().parent().unwrap().to_owned();
            fs::rename(&moved, dir.path().join("moved")).unwrap();
            symlink(outside.path(), moved).unwrap();
        }
    });
    assert!(error.unwrap_err().to_string().contains("removing"));
    assert!(is_empty(&dir.path().join("moved")));
    assert_eq!(fs::read(&precious).unwrap(), vec![1; 1 << 20]);
}

#[test]
fn what_somebody_else_puts_there_stays() {
    let dir = tmpfs();
    let options = Options {
        verify: false,
        runtime: Some(Duration::from_millis(700)),
        number_ios: None,
        ..small(dir.path())
    };
    let put = |dir: &Path| {
        let beside = some_file(dir).unwrap().with_file_name("letter");
        fs::write(beside, "dear").unwrap();
    };
    let error = run(&options, &mut |_| put(dir.path())).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("another program has created files there"),
        "{error}"
    );
    let left = contents(dir.path());
    assert!(
        left.values().all(|data| data == b"dear") && !left.is_empty(),
        "{left:?}"
    );
}
