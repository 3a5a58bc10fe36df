//! The documentation covers all keys that the files contain.

use crate::support::example;
use crate::support::experiment;

use std::collections::BTreeSet;
use std::path::Path;

use fathom_report::analysis::Layer;
use fathom_report::cells::{self, Comparison, Knee, Table};
use fathom_report::render::json;
use fathom_run::evidence::{
    Crossings, DeviceTime, Evidence, Held, Instructions, LockWait, Pressure, Processors,
    ThreadRole, ThreadTime, Throttling,
};
use fathom_run::{
    Better, BlockDevice, Cell, Clocks, Disk, Expects, Extent, GuestOffset, Kind, Machine, Pair,
    Role, Round, Run, Scenario, StreamInfo, Thread, Trial, Unit, VERSION,
};
use serde_json::Value;

fn document(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join("docs").join(name)).unwrap()
}

fn keys(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                found.insert(key.clone());
                keys(value, found);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

fn assert_has_keys(text: &str, value: &Value) {
    let mut found = BTreeSet::new();
    keys(value, &mut found);
    for key in found {
        assert!(
            text.contains(&format!("`{key}`")),
            "`{key}` is not documented"
        );
    }
}

#[test]
fn every_field_of_the_json_report_is_documented() {
    let whole = serde_json::from_str(&json::render(&[&example::analysis()])).unwrap();
    let text = document("report.md") + &document("run-directory.md");
    assert_has_keys(&text, &whole);
}

/// Names of parameters and measures are also keys: these names are documented for other keys.
fn experiment_of_documented_names() -> Run {
    let mut run = experiment::run(2);
    let experiment = run.experiment.as_mut().unwrap();
    experiment.parameters.clear();
    for (i, planned) in experiment.cells.iter_mut().enumerate() {
        planned.settings = experiment::settings(&[("name", ["a", "b"][i % 2]), ("unit", "c")]);
    }
    experiment
        .parameters
        .insert("name".into(), vec!["a".into(), "b".into()]);
    run
}

fn cell_of_documented_names(planned: &fathom_run::Planned) -> Cell {
    let settings = experiment::settings(&[("server", "qemu"), ("threads", "1")]);
    let stand_in = fathom_run::Planned {
        settings,
        ..planned.clone()
    };
    let mut cell = experiment::cell(&stand_in);
    cell.planned = planned.clone();
    cell.measures.truncate(3);
    for (measure, name) in cell.measures.iter_mut().zip(["value", "name", "unit"]) {
        measure.name = name.into();
    }
    cell
}

#[test]
fn every_field_of_an_experiments_report_is_documented() {
    let dir = tempfile::tempdir().unwrap();
    let run = experiment_of_documented_names();
    let cells = run.experiment.as_ref().unwrap().cells.iter();
    experiment::write(dir.path(), &run, cells.map(cell_of_documented_names));
    let mut table = Table::load(dir.path()).unwrap();
    table.points[1].confirmed = Some(true);
    table.knees.push(Knee {
        axis: "name".into(),
        settings: cells::Settings::new(),
        at: String::new(),
        beyond: String::new(),
        or_before: false,
        gain: 0.0,
        verdict: None,
    });
    assert!(table.points[1].vs_bare.is_some() && table.points[1].measures["name"].ratio.is_some());
    let text = document("report.md") + &document("run-directory.md");
    assert_has_keys(&text, &serde_json::from_str(&cells::json(&table)).unwrap());
    let mut other = table.clone();
    other.environment.fathom = "another".into();
    let pair = Comparison::of(("a".into(), table), ("b".into(), other)).unwrap();
    assert_eq!(pair.differences.len(), 1);
    assert_has_keys(&text, &serde_json::from_str(&cells::json(&pair)).unwrap());
}

#[test]
fn every_field_of_a_cell_is_documented() {
    let run = experiment_of_documented_names();
    let mut experiment = run.experiment.unwrap();
    experiment.confirm = true;
    experiment.trials.push(Trial {
        planned: experiment.cells[0].clone(),
        of: String::new(),
        limiter: String::new(),
        expects: Expects::NoMore,
    });
    let text = document("run-directory.md");
    assert_has_keys(&text, &serde_json::to_value(&experiment).unwrap());
    let mut cell = cell_of_documented_names(&experiment.cells[0]);
    let evidence = cell.evidence.take().unwrap();
    cell.evidence = Some(Evidence {
        host: Some(Processors::default()),
        threads: vec![ThreadTime {
            pid: 1,
            tid: 1,
            name: String::new(),
            role: ThreadRole::Io,
            ..ThreadTime::default()
        }],
        cgroup: Some(Throttling::default()),
        pressure: Some(Pressure::default()),
        device: Some(DeviceTime::default()),
        filters: vec![Held {
            filter: String::new(),
            requests: 0,
            mean_ns: 0.0,
        }],
        layers: vec![fathom_run::evidence::Layer {
            name: String::new(),
            mean_ns: 0.0,
        }],
        locks: vec![LockWait {
            name: String::new(),
            side: String::new(),
            waits: 0,
            seconds: 0.0,
        }],
        crossings: Some(Crossings::default()),
        instructions: Some(Instructions::default()),
        ..evidence
    });
    assert_has_keys(&text, &serde_json::to_value(cell).unwrap());
    let name = |value: Value| value.as_str().unwrap().to_owned();
    let better = [Better::Higher, Better::Lower, Better::Neither].map(serde_json::to_value);
    let units = [
        Unit::PerSecond,
        Unit::MegabytesPerSecond,
        Unit::Nanoseconds,
        Unit::Seconds,
        Unit::CpuMicrosecondsPerRequest,
        Unit::PerRequest,
        Unit::Percent,
        Unit::PercentPerMegabyte,
        Unit::Ratio,
        Unit::Count,
        Unit::Bytes,
    ];
    let units = units.map(serde_json::to_value);
    for value in better.into_iter().chain(units) {
        let name = name(value.unwrap());
        assert!(
            text.contains(&format!("`{name}`")),
            "`{name}` is not documented"
        );
    }
}

#[test]
fn every_layer_is_documented_as_it_is() {
    let text = document("report.md");
    let name = |value: Value| value.as_str().unwrap().to_owned();
    for &layer in Layer::ALL {
        let row = format!("| `{}` |", name(serde_json::to_value(layer).unwrap()));
        let line = text.lines().find(|line| line.starts_with(&row));
        let line = line.unwrap_or_else(|| panic!("no row {row}"));
        let (_, group) = layer.describe();
        let group = name(serde_json::to_value(group).unwrap());
        assert!(line.ends_with(&format!("`{group}` |")), "{line}");
        if let Some((from, to)) = layer.span() {
            let words = |point| name(serde_json::to_value(point).unwrap()).replace('_', " ");
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            assert!(cells[2].contains(&words(from)), "{line}");
            assert!(cells[3].contains(&words(to)), "{line}");
        }
    }
}

#[test]
fn every_kind_of_event_is_documented_with_its_arguments() {
    let text = document("run-directory.md");
    for kind in Kind::ALL {
        let args: Vec<String> = kind.args().iter().map(|arg| format!("`{arg}`")).collect();
        let row = format!("| `{}` | {} |", kind.name(), args.join(" "));
        assert!(text.contains(&row), "no row {row}");
    }
}

#[test]
fn every_field_of_a_run_is_documented() {
    let example = example::analysis();
    let pair = Pair {
        tsc: 1,
        monotonic_ns: 1,
    };
    let run = Run {
        version: VERSION,
        kind: example.kind,
        title: example.title,
        created: example.created,
        experiment: Some(experiment_of_documented_names().experiment.unwrap()),
        scenario: Some(Scenario::default()),
        environment: fathom_run::Environment {
            guest: Some(Machine::default()),
            ..Default::default()
        },
        disks: vec![Disk {
            host: Some(BlockDevice::default()),
            extents: vec![Extent {
                offset: 0,
                physical: 0,
                length: 0,
            }],
            ..Disk::default()
        }],
        threads: vec![Thread {
            pid: 1,
            tid: 1,
            name: String::new(),
            role: Role::Io,
            vcpu: None,
        }],
        rounds: vec![Round {
            benchmark: Some(Default::default()),
            clocks: Clocks {
                host: vec![pair],
                guest: vec![pair],
                guest_offset: Some(GuestOffset {
                    before: 0,
                    after: 0,
                    ratio: None,
                    frac_bits: 0,
                }),
                ..Clocks::default()
            },
            streams: vec![StreamInfo {
                name: String::new(),
                clock: fathom_run::Clock::HostTsc,
                events: 0,
                lost: None,
            }],
            ..Round::default()
        }],
        problems: Vec::new(),
    };
    let text = document("run-directory.md");
    assert_has_keys(&text, &serde_json::to_value(run).unwrap());
    assert!(text.contains(&format!("now {VERSION}")));
}
