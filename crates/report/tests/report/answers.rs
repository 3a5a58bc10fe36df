//! Every kind of report begins with its answer, names impossible sums, and fits the width.

use crate::support::example::analysis;
use crate::support::experiment::{cell, one_factor, run, settings, whole, write};
use crate::support::judges::assert_fits;
use fathom_report::analysis::{Analysis, Wiki};
use fathom_report::cells::{self, Comparison, Table, html as pages};
use fathom_report::render::html;
use fathom_report::render::terminal::{Style, compare, report};
use fathom_run::{Beside, Cell, Measure, RunKind, Shown, Unit};
use tempfile::TempDir;

const STYLE: Style = Style { colour: false };

/// Returns the sentences that begin a report: its lines until one that is indented or empty.
fn answer(text: &str) -> String {
    let lines = text.lines();
    let lines = lines.take_while(|line| !line.starts_with("  ") && !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

/// Checks that a report begins with a sentence that has these words, and that no line is too wide.
#[track_caller]
fn answers(text: &str, words: &[&str]) {
    assert_fits(text);
    let answer = answer(text);
    assert!(answer.ends_with('.'), "{answer}\n\n{text}");
    for words in words {
        assert!(answer.contains(words), "{words}: {answer}");
    }
}

/// Checks that a page begins with these words, before its title.
#[track_caller]
fn page_answers(page: &str, words: &str) {
    let (_, body) = page.split_once("<main>\n").unwrap();
    let first = "<header>\n<p class=\"verdict\">";
    assert!(body.starts_with(first), "{}", &body[..200]);
    let (answer, rest) = body.split_once("</p>").unwrap();
    assert!(answer.contains(words), "{words}: {answer}");
    assert!(rest.contains("<h1"), "the title follows");
}

fn table_of(make: impl FnOnce(&std::path::Path)) -> (TempDir, Table) {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path());
    let table = Table::load(dir.path()).unwrap();
    (dir, table)
}

/// Returns the run of a single point, whose limiter has this rule and this text.
fn single(rule: &str, text: &str) -> Table {
    let (_dir, mut table) = table_of(|dir| {
        let mut run = run(1);
        let experiment = run.experiment.as_mut().unwrap();
        experiment.cells.truncate(1);
        for values in experiment.parameters.values_mut() {
            values.truncate(1);
        }
        let cells: Vec<Cell> = experiment.cells.iter().map(cell).collect();
        write(dir, &run, cells);
    });
    table.points[0].limiter = Some(rule.into());
    table.points[0].verdict = Some(text.into());
    table
}

const QUEUE: (&str, &str) = (
    "run-queue",
    "run queue: vCPU 'CPU 0/KVM' waited for a CPU in 34% of the window",
);

#[test]
fn a_breakdown_begins_with_the_layer_to_look_at() {
    let run = analysis();
    answers(&report(&run, STYLE), &["Suspect: 'host: device', 76.31 us"]);
    page_answers(&html::render(&[("a".into(), run)]), "Suspect: ");
}

#[test]
fn evidence_and_layers_are_one_verdict() {
    let mut run = analysis();
    // No layer stands out.
    for row in &mut run.exact.as_mut().unwrap().layers {
        row.time.mean = 8_000.0;
        row.tail_mean = Some(8_000.0);
    }
    run.exact.as_mut().unwrap().total.mean = 88_000.0;
    answers(&report(&run, STYLE), &["No layer stands out."]);
    let table = single(QUEUE.0, QUEUE.1);
    let text = cells::terminal::breakdown(&run, &table, STYLE);
    answers(
        &text,
        &["Limited by run-queue: vCPU 'CPU 0/KVM' waited for a CPU in 34%"],
    );
    assert!(!text.contains("No layer stands out"), "{text}");
    assert_eq!(text.matches("waited for a CPU in 34%").count(), 1, "{text}");
    let advice = "Give the virtual machine and the server CPUs of their own";
    assert!(text.contains(advice), "{text}");
    let page = pages::breakdown(&[("a".into(), run.clone())], &table);
    page_answers(&page, "Limited by run-queue: vCPU");
    assert!(!page.contains("No layer stands out"));
    // An unknown limiter does not hide the layers.
    let table = single("unknown", "unknown: nothing was seen that a rule could use");
    let text = cells::terminal::breakdown(&run, &table, STYLE);
    answers(&text, &["No layer stands out.", "The limiter is unknown:"]);
}

#[test]
fn runs_without_layers_have_an_answer() {
    let mut run = analysis();
    run.exact = None;
    answers(
        &report(&run, STYLE),
        &["The limiter is unknown: no request"],
    );
    run.kind = RunKind::Qemu;
    answers(
        &report(&run, STYLE),
        &["The longest step within QEMU ends with 'virtio_queue_notify': 45.00 us"],
    );
    page_answers(&html::render(&[("a".into(), run)]), "The longest step");
}

#[test]
fn a_comparison_of_breakdowns_begins_with_the_difference() {
    let slower = |by: f64| {
        let mut run = analysis();
        let exact = run.exact.as_mut().unwrap();
        exact.layers[6].time.mean += by;
        exact.total.mean += by;
        run
    };
    let named = |name: &str, run: Analysis| (name.to_owned(), run);
    let mut none = analysis();
    none.exact = None;
    let runs = [
        named("a", analysis()),
        named("b", slower(30_000.0)),
        named("c", none),
        named("d", slower(0.0)),
    ];
    let text = compare(&runs, STYLE);
    let words = [
        "A request of A takes 93.64 us: B takes 30.00 us (32%) longer, most of it in 'host: device' \
         (+30.00 us)",
        "no request of C could be followed",
        "D takes as long.",
    ];
    answers(&text, &words);
    page_answers(&html::render(&runs), "B takes 30.00");
}

#[test]
fn an_experiment_begins_with_what_differs() {
    let (_dir, mut table) = table_of(|dir| drop(whole(dir, 8)));
    let best = table.points.len() - 1;
    table.points[best].limiter = Some(QUEUE.0.into());
    table.points[best].verdict = Some(QUEUE.1.into());
    let words = [
        "The iops against server=qemu, threads=1: ",
        "the highest is 40.96 k/s (3.73x) with server=fathom, threads=8, limited by run-queue: vCPU",
    ];
    answers(&cells::terminal::report(&table, STYLE), &words);
    page_answers(&pages::render(&table), "The iops against");
    let (_dir, table) = table_of(|dir| drop(one_factor(dir, 8)));
    let text = cells::terminal::report(&table, STYLE);
    answers(&text, &["the highest is 31.11 k/s (2.83x) with"]);
    // The ranking is above the tables.
    let at = |words: &str| text.find(words).unwrap();
    assert!(at("Which settings matter") < at("\nPoints"), "{text}");
    assert!(at("\nPoints") < at("\nEnvironment"), "{text}");
}

#[test]
fn points_of_another_test_have_their_own_measure() {
    let (_dir, table) = table_of(|dir| {
        let run = run(1);
        let cells = run.experiment.as_ref().unwrap().cells.iter();
        let cells = cells.map(|planned| {
            let mut cell = cell(planned);
            if planned.settings["threads"] == "8" {
                let rate = cell.measures[2].value;
                let better = cell.measures[2].better;
                cell.measures = vec![Measure::new("packets", Unit::PerSecond, rate, better)];
            }
            cell
        });
        write(dir, &run, cells.collect::<Vec<_>>());
    });
    let text = cells::terminal::report(&table, STYLE);
    answers(&text, &["The iops against", "highest packets"]);
    let other = table.clone();
    let pair = Comparison::of(("a".into(), table), ("b".into(), other)).unwrap();
    let text = cells::terminal::compare(&pair, STYLE);
    answers(&text, &["B against A by iops:", "B against A by packets:"]);
    let change = "threads=8: packets of B is 1.00x";
    assert!(text.contains(change), "{text}");
    page_answers(&pages::compare(&pair), "B against A by iops");
}

#[test]
fn a_single_point_is_a_list_after_its_limiter() {
    let table = single("client", "client: keeps 0.2 requests in flight");
    let text = cells::terminal::report(&table, STYLE);
    answers(
        &text,
        &["Limited by client: keeps 0.2 requests in flight; iops is"],
    );
    let row = text.lines().find(|line| line.contains("latency.p99 (us)"));
    assert!(row.unwrap().split_whitespace().count() <= 4, "{text}");
    let page = pages::render(&table);
    page_answers(&page, "Limited by client: keeps 0.2 requests in flight");
    let (_, points) = page.split_once("id=\"points-table\"").unwrap();
    let (points, _) = points.split_once("</table>").unwrap();
    let headings = points.matches("<th").count() - points.matches("<thead").count();
    assert_eq!(headings, 2, "{points}");
}

#[test]
fn side_by_side_layouts_begin_with_their_base() {
    let (_dir, table) = table_of(|dir| {
        let mut run = run(5);
        let experiment = run.experiment.as_mut().unwrap();
        experiment.beside = Some(Beside {
            parameter: "server".into(),
            shown: vec![Shown {
                measure: "iops".into(),
                heading: "IOPS".into(),
            }],
        });
        let cells: Vec<Cell> = experiment.cells.iter().map(cell).collect();
        write(dir, &run, cells);
    });
    let text = cells::terminal::report(&table, STYLE);
    answers(&text, &["The iops against server=qemu: "]);
}

#[test]
fn an_unfinished_run_says_that_it_has_no_answer() {
    let (_dir, table) = table_of(|dir| write(dir, &run(1), []));
    let text = cells::terminal::report(&table, STYLE);
    answers(&text, &["There is no answer yet: no cell is complete."]);
    page_answers(&pages::render(&table), "There is no answer yet");
}

#[test]
fn an_impossible_sum_is_named_before_all_figures() {
    let mut run = analysis();
    run.wiki = Some(Wiki {
        cumulative: vec![("Fathom".into(), 186_000.0, None)],
        ..Wiki::default()
    });
    let text = report(&run, STYLE);
    assert_fits(&text);
    let error = "! Impossible sum: 'Fathom' takes 186.00 us of a request that takes 93.64 us";
    let at = |words: &str| {
        text.find(words)
            .unwrap_or_else(|| panic!("{words}: {text}"))
    };
    assert!(at(error) < at("spends its time"), "{text}");
    let page = html::render(&[("a".into(), run)]);
    assert!(page.contains("Impossible sum: &#39;Fathom&#39; takes"));
}

#[test]
fn layers_of_the_evidence_are_bars() {
    let (_dir, table) = table_of(|dir| {
        let mut run = run(2);
        let experiment = run.experiment.as_mut().unwrap();
        experiment.cells.retain(|cell| {
            cell.settings
                == settings(&[
                    ("server", "fathom"),
                    ("threads", "1"),
                    ("scenario", "random reads"),
                ])
        });
        let cells = experiment.cells.iter().map(|planned| {
            let mut cell = cell(planned);
            let layer = |name: &str, us: f64| fathom_run::evidence::Layer {
                name: name.into(),
                mean_ns: us * 1e3,
            };
            cell.evidence.as_mut().unwrap().layers = vec![
                layer("guest, KVM and QEMU", 30.0),
                layer("fathom: queue", 2.0),
                layer("host: device", 68.0),
            ];
            cell
        });
        let cells: Vec<Cell> = cells.collect();
        write(dir, &run, cells);
    });
    let text = cells::terminal::report(&table, STYLE);
    assert_fits(&text);
    let bar = |name: &str| {
        let line = text
            .lines()
            .find(|line| line.trim_start().starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
        line.matches('#').count()
    };
    assert_eq!([bar("host: device"), bar("guest, KVM and QEMU")], [34, 15]);
    assert_eq!(bar("fathom: queue"), 1);
    let page = pages::render(&table);
    for words in [
        "id=\"layers-bars\"",
        "--at:0.6800;--c:var(--l-host_device)",
        "68.0%",
    ] {
        assert!(page.contains(words), "{words}");
    }
}
