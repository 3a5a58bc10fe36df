//! Tests `fathom lab run sharing`: files on virtiofs, on a disk, and on this machine itself.

mod support;

use std::process::Stdio;

use fathom_run::{Cell, Run};
use support::{fathom, stdout_of};

const ARGS: &[&str] = &[
    "--way=virtiofs,vhost-user-blk,bare",
    "--test=write,rename",
    "--size=8M",
    "--files=100",
    "--host-cache=dropped",
];

fn check(cell: &Cell) {
    let setting = |name: &str| cell.planned.settings[name].as_str();
    let is_there = |name: &str| cell.measure(name).is_some();
    let value = |name: &str| {
        let found = cell.measure(name);
        found
            .unwrap_or_else(|| panic!("no {name}: {cell:#?}"))
            .value
    };
    assert_eq!(cell.problems, [""; 0]);
    let load = &cell.evidence.as_ref().unwrap().load;
    let cost = match setting("test") {
        "write" => {
            let size = value("throughput") * 1e6 / value("iops");
            assert!((size / 1048576.0 - 1.0).abs() < 0.02, "{size}: {cell:#?}");
            assert_eq!(load.bytes, 8 << 20);
            "cpu-per-gb"
        }
        _ => {
            // The calls ran one after the other, so together they take at most the whole time.
            let calls = value("iops") * value("rename.latency.mean") / 1e9;
            assert!(calls > 0.0 && calls <= 1.05, "{calls}: {cell:#?}");
            assert!(load.requests == 100 && !is_there("throughput"));
            "cpu-per-request"
        }
    };
    let is_guest = setting("way") != "bare";
    for who in ["qemu", "server"] {
        let name = format!("{who}.{cost}");
        assert_eq!(is_there(&name), is_guest, "{name}: {cell:#?}");
        // On a disk, file names are cached in the guest's memory, so the server may have nothing to
        // do.
        let works = who == "qemu" || setting("way") == "virtiofs" || cost == "cpu-per-gb";
        assert!(
            !is_guest || !works || value(&name) > 0.0,
            "{name}: {cell:#?}"
        );
    }
    // The written data has reached the server of the disk.
    if setting("test") == "write" {
        let is_fathoms = is_there("fathom.total.mean") || is_there("fathom.write.total.mean");
        assert_eq!(setting("way") == "vhost-user-blk", is_fathoms, "{cell:#?}");
    }
}

#[test]
fn files_are_reached_by_each_way() {
    let parent = support::disk_dir();
    let dir = parent.path().join("r");
    let mut command = fathom();
    command.args(["lab", "run", "sharing"]).args(ARGS);
    command.arg("--output").arg(&dir).stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let plan = Run::load(&dir).unwrap().experiment.unwrap();
    let cells = plan.load_cells(&dir).unwrap();
    assert_eq!(cells.len(), 6);
    cells.iter().for_each(check);
    let text = stdout_of(&["report", dir.to_str().unwrap()]);
    for words in [
        "A: way=virtiofs, B: way=vhost-user-blk",
        "A: way=virtiofs, B: way=bare",
        "server s/GB",
        "server us each",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
}
