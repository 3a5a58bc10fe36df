//! Reports of runs whose suspected limiters were tried.

use crate::support::experiment::{cell, run, write};
use fathom_report::cells::Table;
use fathom_run::evidence::{Evidence, Layer, Load, Processors};
use fathom_run::{Cell, Expects, Planned, Trial};

/// A cell with one request at a time, most of which is the device's, and nothing busy.
fn one_by_one(planned: &Planned) -> Cell {
    let mut cell = cell(planned);
    if cell.planned.settings["server"] == "fathom" && cell.planned.settings["threads"] == "1" {
        cell.evidence = Some(Evidence {
            seconds: 10.0,
            load: Load {
                threads: 1,
                depth: 1,
                requests: 98_000,
                mean_ns: 1e5,
                thread_cpu: vec![1.0],
                ..Load::default()
            },
            host: Some(Processors {
                busy: vec![20.0; 4],
                steal: vec![0.0; 4],
            }),
            layers: vec![Layer {
                name: "host: device".into(),
                mean_ns: 0.9e5,
            }],
            ..Evidence::default()
        });
    }
    cell
}

/// The point's limiter is latency in all rounds; trials do `times` times as much as their cells.
#[test]
fn trials_confirm_a_limiter_or_do_not() {
    let with_trials = |expects, times: f64| {
        let dir = tempfile::tempdir().unwrap();
        let mut run = run(3);
        let experiment = run.experiment.as_mut().unwrap();
        let cells: Vec<Cell> = experiment.cells.iter().map(one_by_one).collect();
        let mut trials = Vec::new();
        for (number, base) in cells.iter().enumerate() {
            let verdict = fathom_limiter::judge(base.evidence.as_ref().unwrap());
            if verdict.rule() != Some("latency") {
                continue;
            }
            let mut planned = base.planned.clone();
            planned.id = format!("trial-{number}");
            planned.settings.insert("threads".into(), "2".into());
            experiment.trials.push(Trial {
                planned: planned.clone(),
                of: base.planned.id.clone(),
                limiter: "latency".into(),
                expects,
            });
            let mut trial = Cell {
                planned,
                ..base.clone()
            };
            for measure in &mut trial.measures {
                measure.value *= times;
            }
            trials.push(trial);
        }
        assert_eq!(trials.len(), 3);
        write(dir.path(), &run, cells.into_iter().chain(trials));
        let table = Table::load(dir.path()).unwrap();
        assert_eq!(table.points.len(), 6, "trials are no points");
        let told = { table.points.iter() }.filter(|point| point.confirmed.is_some());
        let told: Vec<_> = told.collect();
        assert_eq!(told.len(), 1);
        let verdict = told[0].verdict.clone().unwrap();
        (told[0].confirmed.unwrap(), verdict)
    };
    for (expects, times, confirmed, words) in [
        (Expects::More, 1.9, true, "confirmed: 1.90x with threads=2"),
        (
            Expects::More,
            1.1,
            false,
            "not confirmed: only 1.10x with threads=2",
        ),
        (
            Expects::NoMore,
            1.05,
            true,
            "confirmed: no gain with threads=2 (1.05x)",
        ),
        (
            Expects::NoMore,
            1.5,
            false,
            "not confirmed: gain with threads=2 (1.50x)",
        ),
    ] {
        let (is, verdict) = with_trials(expects, times);
        assert_eq!(is, confirmed, "{verdict}");
        assert!(verdict.ends_with(&format!("; {words}")), "{verdict}");
    }
}
