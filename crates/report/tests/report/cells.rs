//! Reports of experiments: compared with reviewed reports and with an independent oracle, and for
//! runs that are damaged, absurd or hostile.

use std::fs;
use std::path::Path;

use crate::support::experiment::{HOSTILE, cell, run, settings, whole, write};
use crate::support::judges::{assert_fits, assert_golden, oracle};
use fathom_report::cells::{Comparison, Confidence, Table, Verdict, csv, html, json, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::{Better, Cell, Experiment, Measure, Planned, Run, Series, Unit};
use tempfile::TempDir;

fn plain(table: &Table) -> String {
    terminal::report(table, Style::default())
}

fn load(dir: &TempDir) -> Table {
    Table::load(dir.path()).unwrap()
}

pub fn whole_run(rounds: u32) -> (TempDir, Table) {
    let dir = tempfile::tempdir().unwrap();
    whole(dir.path(), rounds);
    let table = load(&dir);
    (dir, table)
}

pub fn saved(run: &Run, dir: &Path) -> Table {
    run.save(dir).unwrap();
    Table::load(dir).unwrap()
}

/// Returns a run in every form.
fn all_pages(table: &Table) -> Vec<String> {
    let other = table.clone();
    let pair = Comparison::of(("a".into(), table.clone()), ("b".into(), other)).unwrap();
    let mut pages = vec![
        plain(table),
        json(table),
        html::render(table),
        terminal::compare(&pair, Style::default()),
        json(&pair),
        html::compare(&pair),
    ];
    pages.extend(csv::render(table).into_iter().map(|file| file.text));
    pages
}

#[test]
fn a_report_is_as_it_was_found_good() {
    let (_dir, mut table) = whole_run(8);
    table.points[1].limiter = Some("device".into());
    table.points[1].verdict = Some("device: 31.8 of 32 in flight, as the host's own".into());
    let text = plain(&table);
    assert_fits(&text);
    assert_golden("cells.txt", &text);
}

#[test]
fn an_interrupted_run_is_as_it_was_found_good() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = run(2);
    run.problems
        .push("the guest's clock source is not the TSC".into());
    let experiment = run.experiment.as_mut().unwrap();
    // Too wide for separate columns.
    experiment
        .parameters
        .insert("image".into(), vec!["raw".repeat(20), "qcow2".into()]);
    for planned in &mut experiment.cells {
        planned.settings.insert("image".into(), "raw".repeat(20));
    }
    let mut cells: Vec<Cell> = experiment.cells.iter().take(3).map(cell).collect();
    cells[1].problems.push("the guest lost its clock".into());
    cells[2].evidence = None;
    write(dir.path(), &run, cells);
    let text = plain(&load(&dir));
    assert_fits(&text);
    assert!(text.contains("3 of 12 cells are complete (fathom lab run --continue RUN runs"));
    assert_golden("cells-interrupted.txt", &text);
}

#[test]
fn a_comparison_is_as_it_was_found_good() {
    let (_dir, a) = whole_run(6);
    let dir = tempfile::tempdir().unwrap();
    let mut run = run(5);
    run.environment.host.kernel = "6.18.0".into();
    let experiment = run.experiment.as_mut().unwrap();
    experiment
        .parameters
        .insert("scenario".into(), vec!["random writes".into()]);
    experiment
        .parameters
        .get_mut("server")
        .unwrap()
        .retain(|name| name != "qsd");
    experiment
        .cells
        .retain(|cell| cell.settings["server"] != "qsd");
    for planned in &mut experiment.cells {
        planned
            .settings
            .insert("scenario".into(), "random writes".into());
    }
    let mut cells: Vec<Cell> = experiment.cells.iter().map(cell).collect();
    for cell in &mut cells {
        let better = cell.planned.settings["threads"] == "8";
        cell.measures[2].value *= if better { 2.0 } else { 1.01 };
    }
    write(dir.path(), &run, cells);
    let comparison = Comparison::of(("a.run".into(), a), ("b.run".into(), load(&dir))).unwrap();
    let text = terminal::compare(&comparison, Style::default());
    assert_fits(&text);
    assert_golden("cells-compared.txt", &text);
    assert!(oracle(&json(&comparison)) > 0);
}

#[test]
fn points_have_their_measures_ratios_and_base() {
    let (_dir, table) = whole_run(8);
    assert_eq!(table.axes, ["server", "threads"]);
    assert_eq!(table.parameters, settings(&[("scenario", "random reads")]));
    assert_eq!(table.main.as_deref(), Some("iops"));
    // The first values of all parameters are the base, independent of the order in which cells ran.
    assert_eq!(
        table.points[0].settings,
        settings(&[("server", "qemu"), ("threads", "1")])
    );
    assert!(
        table.points[0]
            .measures
            .values()
            .all(|figure| figure.ratio.is_none())
    );
    let of = |server: &str, measure: &str| {
        let place = settings(&[("server", server), ("threads", "1")]);
        let point = table
            .points
            .iter()
            .find(|point| point.settings == place)
            .unwrap();
        point.measures[measure].ratio.clone()
    };
    let fathom = of("fathom", "iops").unwrap();
    assert_eq!(fathom.verdict, Verdict::Better);
    assert!((1.3..1.34).contains(&fathom.median), "{fathom:?}");
    assert_eq!(
        of("qsd", "iops").unwrap().verdict,
        Verdict::NoDifferenceShown
    );
    let latency = of("fathom", "latency.p99").unwrap();
    assert!(latency.median < 1.0 && latency.verdict == Verdict::Better);
    // A measure that is neither better nor worse has no ratio.
    assert_eq!(of("fathom", "vcpu0.busy"), None);
    let vs_bare = table.points[0].vs_bare.as_ref().unwrap();
    assert!((vs_bare.median - 0.2).abs() < 1e-9, "{vs_bare:?}");
    assert_eq!(table.points[0].bare.as_ref().unwrap().median, 55_000.0);
}

#[test]
fn figures_are_what_another_program_finds() {
    for rounds in [1, 2, 4, 5, 6, 7, 8] {
        let (_dir, table) = whole_run(rounds);
        assert_eq!(oracle(&json(&table)), 6 * 5, "{rounds} rounds");
        let other = table.clone();
        let pair = Comparison::of(("a".into(), table), ("b".into(), other)).unwrap();
        assert_eq!(oracle(&json(&pair)), 6 * 4 + 2 * 6 * 5, "{rounds} rounds");
    }
}

/// Five points are compared with the first. All six rounds may say the same by chance, for one of
/// the five in one of six runs.
#[test]
fn too_few_rounds_say_how_many_are_missing() {
    for (rounds, more) in [(1, 7), (2, 6), (4, 4), (7, 1)] {
        let (_dir, table) = whole_run(rounds);
        let ratios = table
            .points
            .iter()
            .flat_map(|point| point.measures.values());
        for ratio in ratios.filter_map(|figure| figure.ratio.as_ref()) {
            assert_eq!(ratio.verdict, Verdict::NotEnoughRounds { more });
        }
        let text = plain(&table)
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert!(
            text.contains("?1.3") && text.contains("--continue RUN --rounds 8"),
            "{text}"
        );
        assert!(
            !["better", "worse", "faster", "slower"]
                .iter()
                .any(|word| text.contains(word))
        );
        let Confidence::NotYet(why) = table.confidence(10.0) else {
            panic!("{rounds} rounds are enough");
        };
        let missing = format!(": not enough rounds: {more} more");
        assert!(why.ends_with(&missing), "{why}");
    }
}

#[test]
fn a_run_is_confident_when_its_widest_interval_is_narrow() {
    let (_dir, table) = whole_run(8);
    // qsd's ratio has an interval of 0.985 to 1.025.
    let enough = Confidence::Enough("all intervals of iops are at most 5% wide".into());
    assert_eq!(table.confidence(0.05), enough);
    let Confidence::NotYet(why) = table.confidence(0.01) else {
        panic!("narrower than the rounds allow");
    };
    assert!(why.contains("the interval of iops for server="), "{why}");
    assert!(why.ends_with("% wide, and 1% is wanted"), "{why}");
    // A single point has the interval of its own figure.
    let alone = |rounds| {
        let (_dir, mut table) = whole_run(rounds);
        table.points.truncate(1);
        table
    };
    assert!(matches!(alone(5).confidence(9.0), Confidence::NotYet(_)));
    assert!(matches!(alone(6).confidence(9.0), Confidence::Enough(_)));
    assert!(matches!(alone(6).confidence(0.1), Confidence::NotYet(_)));
    let nothing = Table {
        main: None,
        ..table
    };
    assert!(matches!(nothing.confidence(9.0), Confidence::Never(_)));
}

#[test]
fn two_runs_of_one_round_have_no_verdict_and_no_empty_brackets() {
    let ((_a, a), (_b, mut b)) = (whole_run(1), whole_run(1));
    let pair = Comparison::of(("a".into(), a.clone()), ("b".into(), b.clone())).unwrap();
    let text = terminal::compare(&pair, Style::default());
    assert!(
        text.contains("iops of B is 1.00x that of A: not enough rounds:"),
        "{text}"
    );
    assert!(
        text.contains("more of each run.") && !text.contains("()"),
        "{text}"
    );
    // A single point is a list, whose columns are named like those of a table.
    let mut a = a;
    for table in [&mut a, &mut b] {
        table.points.truncate(1);
        table.points[0].settings.clear();
        table.axes.clear();
    }
    let pair = Comparison::of(("a".into(), a), ("b".into(), b)).unwrap();
    let text = terminal::compare(&pair, Style::default());
    let heading = text
        .lines()
        .find(|line| line.trim_start().starts_with("measure "));
    let columns: Vec<&str> = heading.unwrap().split_whitespace().collect();
    assert_eq!(columns, ["measure", "A", "B", "B/A"], "{text}");
}

#[test]
fn cpu_time_of_a_short_load_has_a_word_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let run = run(2);
    let cells = run.experiment.as_ref().unwrap().cells.iter();
    let cells = cells.map(|planned| {
        let mut cell = cell(planned);
        let evidence = cell.evidence.as_mut().unwrap();
        (evidence.seconds, evidence.load.seconds) = (4.0, 3.9);
        if planned.round == 2 {
            evidence.load.seconds = 1.0;
        }
        cell
    });
    write(dir.path(), &run, cells.collect::<Vec<_>>());
    let table = load(&dir);
    let word = "too high in 6 of 12 cells: the load ran for only 25% of the time";
    let flat = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat(plain(&table)).contains(word), "{}", plain(&table));
    assert!(flat(html::render(&table)).contains(word));
    let (_dir, long) = whole_run(2);
    assert!(!plain(&long).contains("too high"));
}

#[test]
fn why_a_run_has_ended_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = whole(dir.path(), 1);
    let reason = "after 1 round: --max-rounds 1 is reached";
    run.experiment.as_mut().unwrap().ended = Some(reason.into());
    let table = saved(&run, dir.path());
    assert!(plain(&table).contains(reason) && html::render(&table).contains(reason));
    let json: serde_json::Value = serde_json::from_str(&json(&table)).unwrap();
    assert_eq!(json["ended"], reason);
}

#[test]
fn the_same_run_gives_the_same_bytes_wherever_it_lies() {
    let (_here, first) = whole_run(3);
    let (_there, second) = whole_run(3);
    assert!(all_pages(&first) == all_pages(&second));
}

#[test]
fn the_order_in_which_cells_ran_changes_no_figure() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = whole(dir.path(), 5);
    let table = load(&dir);
    run.experiment.as_mut().unwrap().cells.reverse();
    assert_eq!(saved(&run, dir.path()).points, table.points);
}

#[test]
fn tables_become_values_for_other_programs() {
    let (_dir, table) = whole_run(5);
    let files = csv::render(&table);
    assert_eq!([files[0].name, files[1].name], ["points.csv", "cells.csv"]);
    let lines: Vec<&str> = files[0].text.split("\r\n").collect();
    assert!(
        lines[0].starts_with("server,threads,scenario,cells,vcpu0.busy,"),
        "{}",
        lines[0]
    );
    assert!(lines[0].ends_with(",bare,vs_bare,verdict"), "{}", lines[0]);
    assert_eq!(lines.len(), 1 + 6 + 1);
    let columns = lines[0].split(',').count();
    assert!(
        lines[..7]
            .iter()
            .all(|line| line.split(',').count() == columns),
        "{lines:?}"
    );
    let lines: Vec<&str> = files[1].text.split("\r\n").collect();
    assert_eq!(lines.len(), 1 + 30 + 1);
    assert!(
        lines[0].starts_with("id,round,server,threads,scenario,seconds,"),
        "{}",
        lines[0]
    );
    let first = format!("{},{},qemu,1,random reads,12.5,", table.cells[0].id, 1);
    assert!(lines[1].starts_with(&first), "{}", lines[1]);
}

#[test]
fn what_is_no_experiments_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = whole(dir.path(), 1);
    run.experiment = None;
    run.save(dir.path()).unwrap();
    let said = Table::load(dir.path()).unwrap_err().to_string();
    assert!(said.contains("not the run of an experiment"), "{said}");
    let (_dir, a) = whole_run(1);
    let mut b = a.clone();
    b.experiment = HOSTILE.into();
    let said = Comparison::of(("a".into(), a), ("b".into(), b)).unwrap_err();
    assert!(
        said.contains("cannot be compared") && !said.contains(['\x1b', '\n']),
        "{said}"
    );
}

#[test]
fn a_damaged_cell_is_told_and_the_others_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    whole(dir.path(), 2);
    let file = |id: &str| dir.path().join("cells").join(id).join("cell.json");
    let text = fs::read(file("0001")).unwrap();
    fs::write(file("0001"), &text[..text.len() / 2]).unwrap();
    fs::write(file("0002"), &text).unwrap();
    fs::write(
        file("0003"),
        String::from_utf8(text).unwrap().replace("12.5", "1e999"),
    )
    .unwrap();
    fs::remove_file(file("0004")).unwrap();
    fs::create_dir(file("0004")).unwrap();
    let table = load(&dir);
    assert_eq!(
        (table.cells.len(), table.problems.len()),
        (8, 4),
        "{:?}",
        table.problems
    );
    let said = table.problems.join("\n");
    for words in [
        "cell 0001: damaged",
        "cell 0002: it is not the cell",
        "0003: damaged",
        "0004: not a",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains(dir.path().to_str().unwrap()), "{said}");
    let text = plain(&table);
    assert!(text.contains("8 of 12 cells are complete"), "{text}");
    assert_eq!(oracle(&json(&table)), 6 * 5);
    // Wherever the file is cut, the run still loads.
    let whole = fs::read(file("0005")).unwrap();
    for end in (0..whole.len()).step_by(97) {
        fs::write(file("0005"), &whole[..end]).unwrap();
        assert_eq!(load(&dir).cells.len(), 7);
    }
}

#[test]
fn absurd_figures_are_shown_as_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let run = run(6);
    let absurd = [1e308, f64::MIN_POSITIVE, 0.0, -1e308, f64::MAX, 5e-324];
    let cells = run.experiment.as_ref().unwrap().cells.iter().enumerate();
    let cells = cells.map(|(i, planned)| {
        let mut cell = cell(planned);
        for (j, measure) in cell.measures.iter_mut().enumerate() {
            measure.value = absurd[(i / 2 + j) % absurd.len()];
        }
        cell.series[0].values = absurd.to_vec();
        cell.series[0].step = f64::MAX;
        cell.seconds = f64::MAX;
        let bare = cell.evidence.as_mut().unwrap().bare.as_mut().unwrap();
        bare.requests_per_second = absurd[i % absurd.len()];
        cell
    });
    write(dir.path(), &run, cells.collect::<Vec<_>>());
    let table = load(&dir);
    assert_eq!(table.problems, [""; 0]);
    for page in all_pages(&table) {
        for word in ["NaN", "inf", "null,null"] {
            let words = page.split(|c: char| !c.is_alphanumeric() && c != ',');
            assert!(words.clone().all(|found| found != word), "{word} in {page}");
        }
    }
    assert_fits(&plain(&table));
}

#[test]
fn what_is_no_number_in_a_file_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let run = run(1);
    let cells = run.experiment.as_ref().unwrap().cells.iter();
    let cells = cells.map(|planned| {
        let mut cell = cell(planned);
        // JSON writes NaN as null.
        cell.measures[0].value = f64::NAN;
        cell
    });
    write(dir.path(), &run, cells.collect::<Vec<_>>());
    let table = load(&dir);
    assert_eq!((table.cells.len(), table.problems.len()), (0, 6));
    let text = plain(&table);
    assert!(text.contains("0 of 6 cells are complete") && text.contains("No cell is complete"));
    all_pages(&table);
}

#[test]
fn names_of_a_run_do_not_steer_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let long = HOSTILE.repeat(2_000);
    let mut run = run(2);
    run.title = long.clone();
    run.environment.host.cpu = HOSTILE.into();
    run.problems.push(long.clone());
    let hostile: Vec<String> = [HOSTILE, "b", &long].map(str::to_owned).to_vec();
    let experiment = run.experiment.as_mut().unwrap();
    experiment.name = long.clone();
    experiment.parameters.insert(long.clone(), hostile.clone());
    experiment
        .parameters
        .insert("one".into(), vec![HOSTILE.into()]);
    for (i, planned) in experiment.cells.iter_mut().enumerate() {
        planned.id = format!("{i}{}", HOSTILE.replace('/', ""));
        planned
            .settings
            .insert(long.clone(), hostile[i % 3].clone());
    }
    let cells = experiment.cells.iter().map(|planned| {
        let mut cell = cell(planned);
        cell.measures[2].name = long.clone();
        cell.measures[3].name = HOSTILE.into();
        cell.series[0].name = long.clone();
        cell.problems.push(long.clone());
        cell
    });
    let cells: Vec<Cell> = cells.collect();
    write(dir.path(), &run, cells);
    let pages = all_pages(&load(&dir));
    for page in &pages {
        assert!(page.len() < 2_000_000, "{}", page.len());
        let is_html = page.starts_with("<!doctype");
        assert!(!is_html || !page.contains("<img"), "{page}");
    }
    // Terminals, pages and JSON; CSV contains the raw text.
    for page in &pages[..6] {
        assert!(!page.contains('\x1b'), "{page}");
    }
}

#[test]
fn ten_thousand_cells_are_a_table_that_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let values: Vec<String> = (0..2000).map(|i| format!("{i}")).collect();
    let mut run = run(5);
    let planned = |(i, value): (usize, &String), round: u32| Planned {
        id: format!("{round}-{i}"),
        round,
        settings: settings(&[("x", value)]),
    };
    let cells =
        (1..=5).flat_map(|round| values.iter().enumerate().map(move |it| planned(it, round)));
    run.experiment = Some(Experiment {
        name: "many".into(),
        cells: cells.collect(),
        parameters: [("x".to_owned(), values.clone())].into(),
        ..Experiment::default()
    });
    let cells = run
        .experiment
        .as_ref()
        .unwrap()
        .cells
        .iter()
        .map(|planned| {
            let x: f64 = planned.settings["x"].parse().unwrap();
            let name = |i: u32| format!("m{i}");
            let measure = |i| Measure::new(name(i), Unit::Count, x + f64::from(i), Better::Higher);
            Cell {
                planned: planned.clone(),
                measures: (0..4).map(measure).collect(),
                series: vec![Series {
                    name: "s".into(),
                    unit: Unit::Count,
                    first: 0.0,
                    step: 1.0,
                    values: vec![x; 10],
                }],
                ..Cell::default()
            }
        });
    write(dir.path(), &run, cells);
    let table = load(&dir);
    assert_eq!((table.cells.len(), table.points.len()), (10_000, 2_000));
    assert_eq!(table.points[1999].measures["m3"].median, 2002.0);
    let text = plain(&table);
    assert_fits(&text);
    assert!(
        text.contains("and 1000 more points"),
        "{}",
        &text[text.len() - 500..]
    );
    let page = html::render(&table);
    assert!(page.len() < 4_000_000, "{}", page.len());
    assert!(
        page.contains("The first 200 of 2000 points") && page.contains("more cells, which JSON")
    );
}

#[test]
fn units_that_change_and_measures_without_end_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let run = run(2);
    let cells = run.experiment.as_ref().unwrap().cells.iter().enumerate();
    let cells = cells.map(|(i, planned)| {
        let mut cell = cell(planned);
        let measure = |j| Measure::new(format!("{i}.{j}"), Unit::Count, 1.0, Better::Neither);
        cell.measures.extend((0..100).map(measure));
        if i == 5 {
            cell.measures[2].unit = Unit::Percent;
        }
        cell
    });
    write(dir.path(), &run, cells.collect::<Vec<_>>());
    let table = load(&dir);
    assert_eq!(table.measures.len(), 200);
    let said = table.problems.join("\n");
    assert!(said.contains("iops has not the same unit"), "{said}");
    assert!(said.contains("more than 200 measures"), "{said}");
    assert_fits(&plain(&table));
}

#[test]
fn cells_that_hold_breakdowns_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let run = whole(dir.path(), 1);
    let cells = &run.experiment.as_ref().unwrap().cells;
    for planned in &cells[..2] {
        run.save(&planned.folder(dir.path())).unwrap();
    }
    let table = load(&dir);
    assert_eq!(table.breakdowns, ["0001", "0002"]);
    let text = plain(&table);
    assert!(
        text.contains("fathom report RUN/cells/ID prints each"),
        "{text}"
    );
}
