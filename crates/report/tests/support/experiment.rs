//! A run of a made-up experiment, for tests of its pages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fathom_run::evidence::{Bare, Evidence};
use fathom_run::{
    Better, Cell, Environment, Experiment, Machine, Measure, Planned, Run, RunKind, Series, Unit,
    VERSION,
};

/// A name that would end a script, open an element, move a cursor, and split a line of a table.
pub const HOSTILE: &str = "</td></script><img src=x onerror=alert(1)>\x1b[2J\u{202e},\"a\"\nb";

const SERVERS: [&str; 3] = ["qemu", "qsd", "fathom"];
const THREADS: [&str; 2] = ["1", "8"];

/// Returns a run with six cells per round: three servers, each with two numbers of threads.
pub fn run(rounds: u32) -> Run {
    let mut cells = Vec::new();
    for round in 1..=rounds {
        for (i, threads) in THREADS.iter().enumerate() {
            for j in 0..SERVERS.len() {
                // The order differs in each round.
                let server = SERVERS[(j + i + round as usize) % SERVERS.len()];
                cells.push(planned(cells.len() + 1, round, server, threads));
            }
        }
    }
    let owned = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect();
    let parameters: [(&str, Vec<String>); 3] = [
        ("server", owned(&SERVERS)),
        ("threads", owned(&THREADS)),
        ("scenario", owned(&["random reads"])),
    ];
    let parameters = parameters.into_iter();
    Run {
        version: VERSION,
        kind: RunKind::Experiment,
        title: "ffsb: random reads of 8k by three servers".into(),
        created: 1_790_000_000,
        experiment: Some(Experiment {
            name: "ffsb".into(),
            parameters: parameters
                .map(|(name, values)| (name.to_owned(), values))
                .collect(),
            rounds,
            seed: 42,
            cells,
            ..Experiment::default()
        }),
        scenario: None,
        environment: Environment {
            host: Machine {
                kernel: "6.12.41".into(),
                cpu: "AMD EPYC 9354".into(),
                cpus: 64,
                clock_source: "tsc".into(),
                trace_clock: String::new(),
            },
            guest: None,
            remote: None,
            accelerator: "kvm".into(),
            qemu: Some("10.0.2".into()),
            fathom: "0.1.0".into(),
            stretched: false,
        },
        disks: Vec::new(),
        threads: Vec::new(),
        rounds: Vec::new(),
        problems: Vec::new(),
    }
}

fn planned(number: usize, round: u32, server: &str, threads: &str) -> Planned {
    let settings = [
        ("server", server),
        ("threads", threads),
        ("scenario", "random reads"),
    ];
    let settings = settings.iter();
    Planned {
        id: format!("{number:04}"),
        round,
        settings: settings
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
    }
}

/// Returns a cell's measurements. QEMU and qemu-storage-daemon differ only by noise, and Fathom is
/// faster. Later rounds are slower for all.
pub fn cell(planned: &Planned) -> Cell {
    let noise = f64::from(planned.round * 7 % 5) / 100.0;
    let (speed, noise) = match planned.settings["server"].as_str() {
        "fathom" => (1.3, noise),
        "qsd" => (1.005, 0.02 - noise),
        _ => (1.0, 0.0),
    };
    let threads: f64 = planned.settings["threads"].parse().unwrap();
    let drift = 1.0 - 0.1 * f64::from(planned.round);
    let iops = 20_000.0 * threads.sqrt() * (speed + noise) * drift;
    let ns = 1e9 * threads / iops;
    let measure = Measure::new;
    Cell {
        planned: planned.clone(),
        started: 1_790_000_000 + u64::from(planned.round) * 100,
        seconds: 12.5,
        words: BTreeMap::new(),
        measures: vec![
            measure("vcpu0.busy", Unit::Percent, 40.0 * speed, Better::Neither),
            measure("latency.p99", Unit::Nanoseconds, ns * 4.0, Better::Lower).of(100_000),
            measure("iops", Unit::PerSecond, iops, Better::Higher),
            measure(
                "bandwidth",
                Unit::MegabytesPerSecond,
                iops * 8192.0 / 1e6,
                Better::Higher,
            ),
            measure(
                "cpu",
                Unit::CpuMicrosecondsPerRequest,
                9.0 / speed,
                Better::Lower,
            ),
        ],
        series: vec![Series {
            name: "iops".into(),
            unit: Unit::PerSecond,
            first: 1.0,
            step: 1.0,
            values: (0..30)
                .map(|i| iops * (1.0 + f64::from(i % 5) / 50.0))
                .collect(),
        }],
        evidence: Some(Evidence {
            bare: Some(Bare {
                requests_per_second: 100_000.0 * drift,
                bytes_per_second: 8.192e8 * drift,
                mean_ns: 80_000.0,
            }),
            ..Evidence::default()
        }),
        problems: Vec::new(),
    }
}

/// Writes a run and those of its cells that have been run.
pub fn write(dir: &Path, run: &Run, cells: impl IntoIterator<Item = Cell>) {
    run.save(dir).unwrap();
    for cell in cells {
        let folder = cell.planned.folder(dir);
        fs::create_dir_all(&folder).unwrap();
        fs::write(
            folder.join("cell.json"),
            serde_json::to_string(&cell).unwrap(),
        )
        .unwrap();
    }
}

/// Writes a finished run.
pub fn whole(dir: &Path, rounds: u32) -> Run {
    let run = run(rounds);
    let cells = run.experiment.as_ref().unwrap().cells.iter();
    write(dir, &run, cells.map(cell));
    run
}

/// Writes a run of one factor at a time. The base is QEMU with one thread, and each point differs
/// from it in the server or in the threads.
pub fn one_factor(dir: &Path, rounds: u32) -> Run {
    let mut run = run(rounds);
    let experiment = run.experiment.as_mut().unwrap();
    experiment
        .cells
        .retain(|cell| cell.settings["server"] == "qemu" || cell.settings["threads"] == "1");
    let cells: Vec<Cell> = experiment.cells.iter().map(cell).collect();
    write(dir, &run, cells);
    run
}

/// Returns settings in the type that tables use.
pub fn settings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}
