//! Tests `fathom lab run settings` with real guests: it finds the known limits of IDE and of
//! write-through caches.
//!
//! The disk is nbdkit's, which delays reads and logs requests.

mod support;

use std::path::Path;
use std::process::{Child, Command, Stdio};

use fathom_testing::decide;
use serde_json::Value;
use support::{check_refusal, eventually, fathom, listens, short_dir, stdout_of};

/// Delay of a read. The delay exceeds all other times, however slow the guest is.
const DELAY_MS: f64 = 40.0;
/// Duration of a cell in seconds.
const RUNTIME: f64 = 4.0;

/// A disk of 64 MiB without FUA: to make a write durable, the client has to flush.
struct SlowDisk(Child);

impl SlowDisk {
    fn start(dir: &Path) -> SlowDisk {
        let socket = dir.join("nbd.sock");
        let child = Command::new("nbdkit")
            .args(["--foreground", "--exit-with-parent", "--unix"])
            .arg(&socket)
            .args([
                "--filter=fua",
                "--filter=log",
                "--filter=delay",
                "memory",
                "64M",
            ])
            .args([&format!("rdelay={DELAY_MS}ms")])
            .arg(format!("logfile={}", dir.join("log").display()))
            .stdin(Stdio::null())
            .spawn()
            .expect("nbdkit (`make setup`)");
        eventually("nbdkit", || listens(&socket).then_some(()));
        SlowDisk(child)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a measure of the cell with these settings.
fn measure(run: &Path, report: &Value, settings: [&str; 3], name: &str) -> Value {
    let names = ["bus", "cache", "threads"];
    let is = |cell: &&Value| {
        let mut pairs = names.iter().zip(settings);
        pairs.all(|(name, value)| cell["settings"][name] == value)
    };
    let cell = report["cells"].as_array().unwrap().iter().find(is);
    let id = cell.expect("a cell of these settings")["id"].as_str();
    let file = run.join("cells").join(id.unwrap()).join("cell.json");
    let cell: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut measures = cell["measures"].as_array().unwrap().iter();
    measures
        .find(|one| one["name"] == name)
        .expect(name)
        .clone()
}

/// Returns how many requests a cell has made, by the name of their mean latency.
fn requests(run: &Path, report: &Value, settings: [&str; 3], name: &str) -> u64 {
    let mean = measure(run, report, settings, name);
    mean["samples"].as_u64().unwrap()
}

#[test]
fn ide_does_not_scale_and_write_through_flushes_every_write() {
    // A busy machine can keep a guest off its CPU for seconds.
    decide(compare_settings);
}

fn compare_settings() {
    let dir = short_dir();
    let disk = SlowDisk::start(dir.path());
    let image = format!(
        "--image=nbd+unix:///?socket={}/nbd.sock",
        dir.path().display()
    );
    let run = dir.path().join("r");
    let output = fathom()
        .args(["lab", "run", "settings", "--overwrite=on", "--rw=randrw"])
        .args([
            "--bus=virtio-blk,ide",
            "--threads=8,1",
            "--cache=none,writethrough",
        ])
        .args([
            &format!("--runtime={RUNTIME}s"),
            "--seed=1",
            &image,
            "--output",
        ])
        .arg(&run)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    drop(disk);

    let report: Value = {
        let text = stdout_of(&["report", "--json", run.to_str().unwrap()]);
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(report["cells"].as_array().unwrap().len(), 4, "{said}");
    // Average number of reads in flight: the reads that were made, times the delay of each.
    let at_once = |settings| {
        let reads = requests(&run, &report, settings, "read.latency.mean");
        reads as f64 * DELAY_MS / 1e3 / RUNTIME
    };
    let many = at_once(["virtio-blk", "none", "8"]);
    let (alone, ide) = (
        at_once(["virtio-blk", "none", "1"]),
        at_once(["ide", "none", "8"]),
    );
    assert!(
        alone < 1.25 && many > 2.5,
        "{alone} by one thread, {many} by eight"
    );
    assert!(ide < 1.25, "{ide} by eight threads on IDE");
    // About one kick per request. IDE has none, so its cell counts the kicks of other devices.
    let kicks = |settings| {
        let kicks = measure(&run, &report, settings, "kicks");
        kicks["value"].as_f64().unwrap() * kicks["samples"].as_f64().unwrap()
    };
    let virtio = ["virtio-blk", "none", "8"];
    let made = measure(&run, &report, virtio, "kicks")["samples"].as_f64();
    let each = (kicks(virtio) - kicks(["ide", "none", "8"])) / made.unwrap();
    assert!((0.4..1.3).contains(&each), "{each} kicks by virtio-blk");
    let worst = &report["rankings"][0];
    assert_eq!(worst["measure"], "iops");
    let settings: Vec<_> = { worst["effects"].as_array().unwrap().iter() }
        .map(|one| one["setting"].as_str().unwrap())
        .collect();
    assert_eq!(settings.len(), 3);
    assert_ne!(settings[2], "bus", "{worst}");

    let through = ["virtio-blk", "writethrough", "8"];
    let writes = requests(&run, &report, through, "write.latency.mean");
    assert!(writes > 20, "{writes}");
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    let flushes = log
        .lines()
        .filter(|line| line.contains(" Flush id="))
        .count() as u64;
    // A few more flushes come when guests find the disk and when QEMU closes it. Other writes cause
    // none.
    assert!(
        (writes..writes + 40).contains(&flushes),
        "{flushes} of {writes}"
    );
}

/// Every read of the disk takes 40 ms, so twice as many reads in flight double the rate.
#[test]
fn a_suspected_limiter_is_tried() {
    let dir = short_dir();
    let _disk = SlowDisk::start(dir.path());
    let image = format!(
        "--image=nbd+unix:///?socket={}/nbd.sock",
        dir.path().display()
    );
    let run = dir.path().join("r");
    let shown = run.to_str().unwrap();
    let lab = |args: &[&str]| {
        let output = fathom().args(["lab", "run"]).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        said
    };
    let point = || -> Value {
        let report: Value = serde_json::from_str(&stdout_of(&["report", "--json", shown])).unwrap();
        assert_eq!(report["points"].as_array().unwrap().len(), 1);
        report["points"][0].clone()
    };
    let job = ["--runtime=2s", "--rw=randread", &image, "--output", shown];
    lab(&[&["settings", "--overwrite=on"], &job[..]].concat());
    // Other tests may have delayed the threads, so the cell is judged as on an idle machine.
    let file = run.join("cells/1-1/cell.json");
    let mut cell: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let evidence = cell["evidence"].as_object_mut().unwrap();
    evidence.insert("threads".into(), Value::Array(Vec::new()));
    evidence["host"]["busy"] = serde_json::json!([10.0, 10.0]);
    evidence["host"]["steal"] = serde_json::json!([0.0, 0.0]);
    evidence.insert("pressure".into(), Value::Null);
    // QEMU does not report how much of a read is its NBD server's.
    let disk = serde_json::json!([{"name": "NBD server", "mean_ns": 40e6}]);
    evidence.insert("layers".into(), disk);
    std::fs::write(&file, cell.to_string()).unwrap();
    assert_eq!(point()["limiter"], "latency");
    assert!(point()["confirmed"].is_null());

    let said = lab(&["--continue", shown, "--confirm"]);
    assert!(said.contains("is it latency? iodepth=2"), "{said}");
    assert!(!said.contains("cell 1 of"), "{said}");
    let tried = point();
    assert_eq!(tried["confirmed"], true, "{tried}");
    let verdict = tried["verdict"].as_str().unwrap();
    assert!(
        verdict.contains("confirmed: ") && verdict.contains("with iodepth=2"),
        "{verdict}"
    );
    // A limiter that was tried is not tried again.
    let said = lab(&["--continue", shown]);
    assert!(!said.contains("is it"), "{said}");
}

#[test]
fn a_run_is_planned_one_factor_at_a_time_or_in_full() {
    let dir = short_dir();
    let lab = |args: &[&str]| {
        let output = fathom()
            .args(["lab", "run", "settings", "--dry-run", "--rounds=2"])
            .args(args)
            .current_dir(dir.path())
            .output()
            .unwrap();
        (
            output.status,
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()),
        )
    };
    let cells = |args: &[&str]| {
        let (status, [plan, error]) = lab(args);
        assert!(status.success(), "{error}");
        plan.lines().filter(|line| line.contains("round ")).count()
    };
    let axes = [
        "--bus=virtio-blk,virtio-scsi,ide,nvme",
        "--cache=none,writethrough",
    ];
    assert_eq!(cells(&axes), 2 * 5);
    assert_eq!(cells(&[&axes[..], &["--full"]].concat()), 2 * 8);
    let (status, [_, error]) = lab(&[&axes[..], &["--disk=fathom"]].concat());
    let words = ["vhost-user disks are virtio-blk", "--disk fathom"];
    check_refusal(status, &error, 1, &words);
}
