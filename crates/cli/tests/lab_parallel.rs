//! Tests `fathom lab run parallel`: machines that run at the same time, what they find on their
//! disks, and failures that count as results.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use fathom_run::evidence::ThreadRole;
use fathom_run::{Cell, Run};
use support::{fathom, instead_of, stdout_of};

fn lab(args: &[&str], dir: &Path) -> Command {
    let mut command = fathom();
    command.args(["lab", "run", "parallel"]).args(args);
    command.arg("--output").arg(dir).stdin(Stdio::null());
    command
}

/// Runs a command that must succeed. Returns the cells, ordered by the number of machines.
fn cells(command: &mut Command, dir: &Path) -> Vec<Cell> {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let plan = Run::load(dir).unwrap().experiment.unwrap();
    let mut cells = plan.load_cells(dir).unwrap();
    assert_eq!(cells.len(), plan.cells.len());
    cells.sort_by_key(appliances);
    cells
}

fn appliances(cell: &Cell) -> u32 {
    cell.planned.settings["appliances"].parse().unwrap()
}

fn value(cell: &Cell, name: &str) -> f64 {
    let found = cell.measure(name);
    let found = found.unwrap_or_else(|| panic!("no {name}: {cell:#?}"));
    found.value
}

/// Checks that all figures of a cell agree on its times.
fn check_times(cell: &Cell) {
    let count = f64::from(appliances(cell));
    let of = |name| value(cell, name);
    assert!(
        of("up.mean") <= of("up") && of("up") < of("closed"),
        "{cell:#?}"
    );
    assert!((of("per-appliance") * count / of("closed") - 1.0).abs() < 1e-9);
    assert!((of("rate") * of("per-appliance") - 1.0).abs() < 1e-9);
    let cpus = std::thread::available_parallelism().unwrap().get() as f64;
    let efficiency = of("alone") * count / (of("closed") * count.min(cpus));
    assert!(
        (of("efficiency") / efficiency - 1.0).abs() < 1e-9,
        "{cell:#?}"
    );
    let evidence = cell.evidence.as_ref().unwrap();
    assert_eq!(f64::from(evidence.load.threads), count);
    // The evidence covers the time from the first start until all machines are up.
    let begun_before = evidence.seconds > of("up") * 0.8;
    assert!(
        begun_before && evidence.seconds <= cell.seconds,
        "{cell:#?}"
    );
}

#[test]
fn machines_with_own_servers_inspect_one_disk_in_parallel() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let args = ["--appliances=3", "--disk=fathom-each", "--work=inspect"];
    for cell in cells(&mut lab(&args, &run), &run) {
        assert_eq!(cell.problems, [""; 0]);
        check_times(&cell);
        // All machines ran, each with a server that mapped its memory. The kernel does not merge
        // memory that is shared with a server.
        let evidence = cell.evidence.as_ref().unwrap();
        let processes = |role: ThreadRole| {
            let threads = { evidence.threads.iter() }.filter(|one| one.role == role);
            let mut pids: Vec<u32> = threads.map(|one| one.pid).collect();
            pids.sort_unstable();
            pids.dedup();
            pids.len() as u32
        };
        assert_eq!(processes(ThreadRole::Vcpu), appliances(&cell));
        // The main threads of QEMU and of the server.
        assert_eq!(processes(ThreadRole::Main), 2 * appliances(&cell));
        let parts = value(&cell, "memory.qemu") + value(&cell, "memory.servers");
        assert!((value(&cell, "memory.each") / parts - 1.0).abs() < 1e-9);
        assert!(value(&cell, "memory.shared") < value(&cell, "memory.qemu"));
        assert!(cell.measure("memory.merged.each").is_none());
    }
    let report = stdout_of(&["report", run.to_str().unwrap()]);
    assert!(report.contains("Suspected limiters"), "{report}");
}

/// A machine needs more than 100 MiB and less than 400 MiB.
#[test]
fn steps_go_on_until_no_more_fit_and_that_is_the_result() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let args = [
        "--appliances=1",
        "--step=1",
        "--disk=fathom",
        "--max-memory=400M",
    ];
    let cells = cells(&mut lab(&args, &run), &run);
    let (last, others) = cells.split_last().unwrap();
    for (count, cell) in (1..).zip(others) {
        assert_eq!(appliances(cell), count);
        check_times(cell);
    }
    assert!(!others.is_empty() && cells.len() <= 5, "{cells:#?}");
    assert_eq!(value(last, "failed"), cells.len() as f64);
    assert!(last.measure("rate").is_none(), "{last:#?}");
    let problem = &last.problems[0];
    for words in ["not started", "of --max-memory", "400M"] {
        assert!(problem.contains(words), "{problem}");
    }
    let report = stdout_of(&["report", run.to_str().unwrap()]);
    assert!(report.contains("not started: one takes"), "{report}");
}

#[test]
fn machine_that_does_not_start_fails_its_cell_only() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let qemu = stdout_path("qemu-system-x86_64");
    // The first two processes run alone. The fourth ends before its guest has booted.
    let script = format!(
        "case \"$*\" in *--version*) exec {qemu} \"$@\";; esac\n\
         n=1; while ! mkdir {0}/$n 2>/dev/null; do n=$((n + 1)); done\n\
         [ $n != 4 ] || {{ sleep 0.5; echo 'QEMU ended early' >&2; exit 1; }}\n\
         exec {qemu} \"$@\"",
        dir.path().display()
    );
    let args = ["--appliances=1,2", "--merge=on", "--seed=1"];
    let mut command = lab(&args, &run);
    command.env(
        "PATH",
        instead_of("qemu-system-x86_64", &script, dir.path()),
    );
    let cells = cells(&mut command, &run);
    let (failed, ended): (Vec<_>, Vec<_>) = cells
        .iter()
        .partition(|cell| cell.measure("failed").is_some());
    assert_eq!((failed.len(), ended.len()), (1, 1), "{cells:#?}");
    let problem = failed[0].problems.join("\n");
    assert!(problem.contains("QEMU ended early"), "{problem}");
    check_times(ended[0]);
    // Equal pages were merged if the test runs as root and the kernel supports it.
    let merged = ended[0].measure("memory.merged.each");
    match merged {
        Some(merged) => assert!(merged.value < value(ended[0], "memory.each")),
        None => assert!(ended[0].problems[0].contains("merged"), "{ended:#?}"),
    }
}

fn stdout_path(program: &str) -> String {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .output()
        .unwrap();
    String::from_utf8(found.stdout).unwrap().trim().to_owned()
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    for (args, words) in [
        (&["--work=inspect"][..], "needs a disk"),
        (&["--step=5", "--appliances=1,2"], "--step: needs one value"),
        (&["--memory=16M"], "is not within 64M"),
        (
            &["--disk=qsd"],
            "is none of none, fathom, fathom-each, qemu",
        ),
    ] {
        let run = dir.path().join("run");
        let output = lab(args, &run).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{said}");
        assert!(!run.exists());
    }
}
