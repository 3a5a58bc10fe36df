//! Tests `fathom lab run storages` and `bonnie`, as users run them.
//!
//! The experiments run on the host over two file systems and an NBD export, and in one guest each.

mod support;

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use fathom_run::{Better, Cell, Run};
use support::nbd::Nbd;
use support::{as_arg, disk_dir, refused, run, short_dir};
use tempfile::TempDir;

const SIZE: u64 = 4 << 20;
const JOBS: u64 = 4;
/// An export with room for the files of all jobs.
const EXPORT: &str = "memory:64M";

/// Runs an experiment. Returns its output and its cells.
fn lab(dir: &Path, args: &[&str]) -> (String, Vec<Cell>) {
    let out = dir.join("r");
    let out = as_arg(&out);
    let head = ["lab", "run"];
    let output = run(&[&head[..], args, &["--output", &out]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let run = Run::load(Path::new(&out)).unwrap();
    let cells = run.experiment.unwrap().load_cells(Path::new(&out)).unwrap();
    (String::from_utf8(output.stdout).unwrap(), cells)
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

fn of<'a>(cells: &'a [Cell], name: &str, value: &str) -> &'a Cell {
    let mut cells = cells.iter();
    let found = cells.find(|cell| cell.planned.settings[name] == value);
    found.unwrap_or_else(|| panic!("no cell {name}={value}"))
}

fn value(cell: &Cell, name: &str) -> f64 {
    let measure = cell.measure(name);
    measure
        .unwrap_or_else(|| panic!("no {name}: {cell:?}"))
        .value
}

/// Returns a directory on another file system than the build's, if O_DIRECT works there.
///
/// Also returns the name of that file system.
fn other_dir() -> (TempDir, Option<&'static str>) {
    let memory = tempfile::tempdir_in("/dev/shm").expect("/dev/shm");
    let file = memory.path().join("f");
    let mut options = fs::OpenOptions::new();
    options
        .write(true)
        .create(true)
        .custom_flags(libc::O_DIRECT);
    let opened = options.open(&file).is_ok();
    fs::remove_file(&file).ok();
    match opened {
        true => (memory, Some("tmpfs (")),
        false => (disk_dir(), None),
    }
}

#[test]
fn storages_are_held_against_each_other_on_the_host() {
    let mut served = Nbd::start(EXPORT, &[]);
    let uri = served.uri();
    let (disk, out) = (disk_dir(), short_dir());
    let (other, kind) = other_dir();
    // A name with a comma, and a file that exists already.
    let odd = other.path().join("a,b");
    fs::create_dir(&odd).unwrap();
    fs::write(disk.path().join("virt.0.0"), "mine").unwrap();
    let (first, second) = (as_arg(disk.path()), as_arg(&odd));
    let places = format!("{first},{},{uri}", second.replace(',', "\\,"));
    let args = [
        "storages",
        "--where=host",
        "--size=4M",
        "--overwrite",
        "--place",
        &places,
    ];
    let (text, cells) = lab(out.path(), &args);
    assert_eq!(cells.len(), 3);
    for place in [&first, &second, &uri] {
        let cell = of(&cells, "place", place);
        let evidence = cell.evidence.as_ref().unwrap();
        // Each block is read or written once.
        assert_eq!(evidence.load.bytes, JOBS * SIZE, "{place}");
        assert_eq!((evidence.load.threads, evidence.load.depth), (4, 4));
        assert!(value(cell, "iops") > 0.0);
        assert!(cell.measure("read.latency.mean").is_some(), "{cell:?}");
    }
    let words = |place: &str| of(&cells, "place", place).words["place"].clone();
    let second = words(&second);
    assert!(second.starts_with(kind.unwrap_or_default()), "{second}");
    let flat: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let sentence = format!("{} needs 6 more rounds for a verdict next to", words(&uri));
    assert!(flat.contains(&sentence), "{text}");
    // The files of the command are removed, and other files are unchanged.
    assert!(is_empty(&odd));
    assert_eq!(
        fs::read_to_string(disk.path().join("virt.0.0")).unwrap(),
        "mine"
    );
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 1);
    let (_, table) = served.terminate();
    assert!(table.contains("write") && table.contains("read"), "{table}");
}

/// Boots one guest. The server of its disk is an NBD client of another server.
#[test]
fn an_export_is_a_guests_disk() {
    let served = Nbd::start(EXPORT, &[]);
    let uri = served.uri();
    let out = short_dir();
    let args = [
        "storages",
        "--where=guest",
        "--size=4M",
        "--overwrite",
        "--vcpus=1",
        "--place",
        &uri,
    ];
    let (_, cells) = lab(out.path(), &args);
    let [cell] = &cells[..] else {
        panic!("{cells:?}");
    };
    let evidence = cell.evidence.as_ref().unwrap();
    assert_eq!(evidence.load.bytes, JOBS * SIZE);
    assert!(["virtualisation", "emulation"].contains(&cell.words["where"].as_str()));
    // Fathom saw the requests of fio. The guest's kernel may have merged adjacent ones.
    let seen = cell.measure("fathom.read.total.mean").unwrap().samples;
    let asked = cell.measure("read.latency.mean").unwrap().samples;
    assert!(seen * 2 > asked && asked > 0, "{seen} {asked}");
    drop(served);
}

/// Boots one guest. The lab has not started the server of its disk.
#[test]
fn a_running_server_is_asked_for_its_stages() {
    let (dir, out) = (short_dir(), short_dir());
    let socket = as_arg(&dir.path().join("s"));
    let served = Nbd::start(EXPORT, &["--vhost-user", &socket]);
    let disk = format!("--disk=socket:{socket}");
    let args = ["seqread", &disk, "--size=16M", "--runtime=1s"];
    let (_, cells) = lab(out.path(), &args);
    let cell = &cells[0];
    assert!(value(cell, "fathom.total.mean") > 0.0, "{cell:?}");
    let evidence = cell.evidence.as_ref().unwrap();
    let is_stage = |name: &str| name.starts_with("fathom: ");
    let mut layers = evidence.layers.iter();
    assert!(layers.any(|layer| is_stage(&layer.name)), "{evidence:?}");
    let mut threads = evidence.threads.iter();
    assert!(
        threads.any(|thread| thread.name == "worker 0"),
        "{evidence:?}"
    );
    drop(served);
}

#[test]
fn what_storages_would_destroy_or_cannot_use_is_refused() {
    let dir = short_dir();
    let out = as_arg(&dir.path().join("r"));
    let file = dir.path().join("f");
    fs::write(&file, "").unwrap();
    let file = as_arg(&file);
    for (args, code, words) in [
        (
            &["--place=nbd://localhost"][..],
            1,
            ["nbd://localhost", "pass --overwrite"],
        ),
        (&["--place", &file], 1, [&file, "neither a directory"]),
        (&["--place=/nowhere/at,all"], 1, ["/nowhere/at", "\\,"]),
        (&["--place=http://x"], 2, ["--place", "nbd+unix://"]),
        (&["--size=1T"], 1, ["needs 4T", "smaller --size"]),
        (&["--disk=socket:/s"], 1, ["socket:/s", "not in the place"]),
    ] {
        let all = [&["lab", "run", "storages", "--output", &out][..], args].concat();
        refused(code, &all, &words);
    }
    assert!(!dir.path().join("r").exists());
}

/// Boots one guest.
#[test]
fn bonnie_runs_in_a_guest_and_has_its_own_table() {
    let out = short_dir();
    let args = [
        "bonnie",
        "--disk=fathom",
        "--size=32M",
        "--direct",
        "--memory=256M",
        "--vcpus=1",
        "--files=1",
    ];
    let (text, cells) = lab(out.path(), &args);
    let cell = &cells[0];
    assert_eq!(
        cell.measure("putc.throughput"),
        None,
        "it was not asked for"
    );
    // The rate cannot be predicted, and a phase that is too fast has none. Each phase has its
    // longest operation.
    for phase in [
        "put-block",
        "rewrite",
        "get-block",
        "seeks",
        "seq-create",
        "ran-delete",
    ] {
        assert!(value(cell, &format!("{phase}.latency")) > 0.0, "{phase}");
    }
    let mut rates = cell
        .measures
        .iter()
        .filter(|one| one.better == Better::Higher);
    assert!(rates.all(|one| one.value > 0.0), "{cell:?}");
    for words in ["Sequential Output", "Random Create", "K/sec %CP", "latency"] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    let size = ["lab", "run", "bonnie", "--size=1G"];
    refused(1, &size, &["--size 1G", "memory (1G)", "--direct"]);
}
