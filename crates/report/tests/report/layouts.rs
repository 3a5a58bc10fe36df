//! Parts of an experiment's report besides its table: the effects of parameters' values, and
//! bonnie++'s own table.

use std::collections::BTreeMap;
use std::path::Path;

use fathom_report::cells::{Table, html, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::evidence::{Bare, Evidence};
use fathom_run::{
    Better, Cell, Environment, Experiment, Measure, Planned, Run, RunKind, Unit, VERSION,
};

type Axes<'a> = &'a [(&'a str, &'a [&'a str])];

/// A run with every combination of two parameters' values; `cell` adds what each cell measured.
fn run(dir: &Path, axes: Axes, rounds: u32, cell: impl Fn(&Planned, &mut Cell)) -> Table {
    let owned = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect();
    let parameters = axes.iter();
    let mut experiment = Experiment {
        name: "made-up".into(),
        parameters: parameters
            .map(|(name, values)| ((*name).to_owned(), owned(values)))
            .collect(),
        rounds,
        ..Experiment::default()
    };
    let mut places = vec![BTreeMap::new()];
    for (name, values) in axes {
        let with = |place: &BTreeMap<String, String>| -> Vec<BTreeMap<String, String>> {
            let each = values.iter().map(|value| {
                let mut place = place.clone();
                place.insert((*name).to_owned(), (*value).to_owned());
                place
            });
            each.collect()
        };
        places = places.iter().flat_map(with).collect();
    }
    for round in 1..=rounds {
        for (i, settings) in places.iter().enumerate() {
            let planned = Planned {
                id: format!("{i}-{round}"),
                round,
                settings: settings.clone(),
            };
            let mut done = Cell {
                planned: planned.clone(),
                ..Cell::default()
            };
            cell(&planned, &mut done);
            done.save(dir).unwrap();
            experiment.cells.push(planned);
        }
    }
    let run = Run {
        version: VERSION,
        kind: RunKind::Experiment,
        title: "made-up".into(),
        created: 1_790_000_000,
        experiment: Some(experiment),
        scenario: None,
        environment: Environment::default(),
        disks: Vec::new(),
        threads: Vec::new(),
        rounds: Vec::new(),
        problems: Vec::new(),
    };
    run.save(dir).unwrap();
    Table::load(dir).unwrap()
}

fn in_terminal(table: &Table) -> String {
    let text = terminal::report(table, Style::default());
    let wide = text.lines().find(|line| line.chars().count() > 100);
    assert_eq!(wide, None, "{text}");
    text
}

/// Removes line breaks, which can be anywhere.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

const PLACES: Axes = &[("place", &["/srv", "/mnt"]), ("where", &["host", "guest"])];

/// The figures of the post: NFS is 3.1 times slower, virtualisation costs 8%.
fn storage(planned: &Planned, cell: &mut Cell) {
    let (place, side) = (&planned.settings["place"], &planned.settings["where"]);
    let (word, speed) = match place.as_str() {
        "/srv" => ("ext4 (/srv)", 1.0),
        _ => ("NFS (/mnt)", 1.0 / 3.1),
    };
    cell.words.insert("place".into(), word.into());
    let mut iops = 1000.0 * speed;
    if side == "guest" {
        cell.words.insert("where".into(), "virtualisation".into());
        iops *= 0.92;
    }
    cell.measures
        .push(Measure::new("iops", Unit::PerSecond, iops, Better::Higher));
}

#[test]
fn what_values_make_of_the_main_measure_is_told_in_sentences() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), PLACES, 8, storage);
    let text = flat(&in_terminal(&table));
    let nfs = "NFS (/mnt) makes this 3.1 times slower than ext4 (/srv) (0.32x, 0.32..0.32).";
    let guest = "virtualisation makes this 8% slower (0.92x, 0.92..0.92).";
    for sentence in [
        "By iops: each value next to the first of its parameter",
        &format!("where=host: {nfs}"),
        &format!("where=guest: {nfs}"),
        &format!("place=/srv: {guest}"),
        &format!("place=/mnt: {guest}"),
    ] {
        assert!(text.contains(sentence), "{sentence}\n{text}");
    }
    assert_eq!(text.matches(" makes ").count(), 4, "{text}");
    let page = html::render(&table);
    let item = format!("<li>place=/srv: {guest}</li>");
    assert!(page.contains(&item), "{page}");
    let json = serde_json::to_value(&table).unwrap();
    assert_eq!(json["points"][1]["words"]["where"], "virtualisation");
}

#[test]
fn a_difference_that_may_be_chance_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), PLACES, 8, |planned, cell| {
        storage(planned, cell);
        // The guest is faster in one half of the rounds, slower in the other.
        if planned.settings["where"] == "guest" && planned.round % 2 == 0 {
            cell.measures[0].value *= 1.2;
        }
    });
    let text = flat(&in_terminal(&table));
    let noise = "place=/srv: virtualisation makes no difference that the rounds show (~";
    assert!(text.contains(noise), "{text}");
    let slower = "NFS (/mnt) makes this 3.1 times slower than ext4 (/srv) (0.32x, 0.32..0.32).";
    assert!(text.contains(slower), "{text}");
}

#[test]
fn a_sentence_of_few_rounds_says_how_many_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), PLACES, 1, storage);
    let text = flat(&in_terminal(&table));
    for sentence in [
        "where=host: NFS (/mnt) needs 7 more rounds for a verdict next to ext4 (/srv) (?0.32x).",
        "place=/srv: virtualisation needs 7 more rounds for a verdict (?0.92x).",
    ] {
        assert!(text.contains(sentence), "{sentence}\n{text}");
    }
    assert!(!text.contains("slower"), "{text}");
}

#[test]
fn without_words_nothing_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), PLACES, 1, |planned, cell| {
        storage(planned, cell);
        cell.words.clear();
    });
    assert!(!in_terminal(&table).contains("Effects"));
    assert!(!html::render(&table).contains("effects-list"));
}

/// Words of an untrusted run are clipped and stay text.
#[test]
fn words_of_a_run_are_bounded_and_stay_text() {
    let dir = tempfile::tempdir().unwrap();
    let hostile = format!("<img src=x>\x1b[2J{}", "x".repeat(1 << 16));
    let table = run(dir.path(), PLACES, 1, |planned, cell| {
        storage(planned, cell);
        cell.words.insert("place".into(), hostile.clone());
    });
    let text = terminal::report(&table, Style::default());
    assert!(!text.contains('\x1b') && text.len() < 10_000);
    assert!(!html::render(&table).contains("<img"));
}

const DISKS: Axes = &[("disk", &["qemu-main", "qemu"])];

/// Some figures of the post about QEMU's first data plane.
fn bonnie(planned: &Planned, cell: &mut Cell) {
    let is_on = planned.settings["disk"] == "qemu";
    let mut add = |name: &str, unit, better, off: f64, on: f64| {
        let value = if is_on { on } else { off };
        cell.measures.push(Measure::new(name, unit, value, better));
    };
    let mut data = |name: &str, off: [f64; 3], on: [f64; 3]| {
        let mb = |kib: f64| kib * 1024.0 / 1e6;
        let unit = Unit::MegabytesPerSecond;
        add(
            &format!("{name}.throughput"),
            unit,
            Better::Higher,
            mb(off[0]),
            mb(on[0]),
        );
        add(
            &format!("{name}.cpu"),
            Unit::Percent,
            Better::Lower,
            off[1],
            on[1],
        );
        let (off, on) = (off[2] * 1e6, on[2] * 1e6);
        add(
            &format!("{name}.latency"),
            Unit::Nanoseconds,
            Better::Lower,
            off,
            on,
        );
    };
    data("put-block", [74157.0, 13.0, 632.0], [61252.0, 12.0, 1189.0]);
    data("get-block", [50335.0, 6.0, 299.0], [91454.0, 12.0, 275.0]);
    add("seeks.rate", Unit::PerSecond, Better::Higher, 263.5, 242.6);
    if is_on {
        add(
            "ran-delete.rate",
            Unit::PerSecond,
            Better::Higher,
            0.0,
            32179.0,
        );
    }
    let host = Measure::new("host.busy", Unit::Percent, 40.0, Better::Lower);
    cell.measures.push(host);
}

#[test]
fn figures_of_bonnie_stand_in_its_own_table() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), DISKS, 1, bonnie);
    let text = in_terminal(&table);
    let lines: Vec<&str> = text.lines().collect();
    let line = |start: &str| -> Vec<Vec<&str>> {
        let all = lines
            .iter()
            .filter(|line| line.trim_start().starts_with(start));
        all.map(|line| line.split_whitespace().collect()).collect()
    };
    let off = vec!["qemu-main", "74157", "13", "50335", "6", "263.5"];
    assert!(line("qemu-main ").contains(&off), "{text}");
    assert!(line("qemu ").contains(&vec!["qemu", "61252", "12", "91454", "12", "242.6"]));
    assert!(line("qemu ").contains(&vec!["qemu", "32179"]), "{text}");
    // qemu-main has no figure in this part.
    assert!(
        lines.iter().any(|line| line.trim() == "qemu-main"),
        "{text}"
    );
    assert_eq!(
        line("ratio"),
        [vec!["ratio", "?0.83x", "?1.82x", "?0.92x"]],
        "{text}"
    );
    let latency = vec!["latency", "1189", "ms", "275.0", "ms"];
    assert!(line("latency").contains(&latency), "{text}");
    // Each figure is below its heading.
    let heading = lines.iter().find(|line| line.contains("Rewrite")).unwrap();
    let figures = lines.iter().find(|line| line.contains("74157")).unwrap();
    let (from, to) = (
        heading.find("-Block").unwrap(),
        heading.find("Rewrite").unwrap(),
    );
    let at = figures.find("74157").unwrap();
    assert!(from - 6 < at && at < to, "{text}");
    // No figure has a second table, and other measures are in their usual table.
    let (_, tables) = text.split_once("\nbonnie++\n").unwrap();
    assert!(
        !tables.contains("put-block") && tables.contains("host.busy"),
        "{text}"
    );
    // Legends explain only columns that the tables have.
    assert!(flat(tables).contains("latency is the longest operation"));
    assert!(!tables.contains("vs bare"), "{text}");

    let page = html::render(&table);
    for markup in [
        "<th colspan=\"6\">Sequential Output</th>",
        "<th colspan=\"2\">Rewrite</th>",
        "<td class=\"number\">61252<small>latency 1189 ms</small><small>?0.83x</small></td>",
        "id=\"bonnie-1\"",
    ] {
        assert!(page.contains(markup), "{markup}\n{page}");
    }
    assert!(!page.contains("put-block (") && page.contains("host.busy"));
}

#[test]
fn legends_of_columns_that_bonnie_has_not_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), DISKS, 1, |planned, cell| {
        bonnie(planned, cell);
        let is_shown = |measure: &Measure| measure.name.ends_with(".throughput");
        cell.measures.retain(is_shown);
        cell.evidence = Some(Evidence {
            bare: Some(Bare {
                requests_per_second: 1.0,
                bytes_per_second: 1e9,
                mean_ns: 1.0,
            }),
            ..Evidence::default()
        });
    });
    assert!(table.points[0].vs_bare.is_some());
    let text = flat(&in_terminal(&table));
    for absent in ["latency", "%CP is", "vs bare", "Points"] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    assert!(text.contains("K/sec are 1024 bytes, a ratio is to the first row"));
}

#[test]
fn long_names_get_numbers_in_bonnies_table() {
    let axes: Axes = &[
        ("disk", &["qemu-main", "qemu"]),
        ("socket", &["a-long-name-of-something", "b"]),
    ];
    let dir = tempfile::tempdir().unwrap();
    let text = in_terminal(&run(dir.path(), axes, 3, bonnie));
    assert!(
        text.contains("disk=qemu, socket=a-long-name-of-something"),
        "{text}"
    );
    let row = text
        .lines()
        .find(|line| line.trim_start().starts_with("#3 ") && line.contains("61252"));
    assert!(row.is_some(), "{text}");
    assert!(text.contains("  interval"), "{text}");
}
