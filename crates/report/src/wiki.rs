//! The KVM wiki's arithmetic: mean times between two events, and their differences.

mod means;

use fathom_run::{Round, Run};

use crate::analysis::{QemuStep, Wiki};

use means::{Mean, ROWS, Row};
pub(crate) use means::{Means, Served};

/// The measurements of one round.
#[derive(Clone, Debug, Default)]
struct Measured {
    rows: [Mean; 4],
    /// The benchmark's own mean in ns.
    control: Option<f64>,
    io_of_calls: bool,
}

impl Measured {
    /// Returns which rows were measured.
    fn has(&self) -> [bool; 4] {
        self.rows.map(|row| row.count > 0)
    }
}

/// The wiki's tables, from all rounds.
///
/// Rows are subtracted from each other, so all of them come from rounds with the same rows.
/// Tracing costs time, and the cost differs between kinds of rounds.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rounds: Vec<Measured>,
    /// The round with QEMU's own events.
    qemu: Option<Measured>,
}

impl Table {
    /// Adds the measurements of one round.
    pub(crate) fn add(&mut self, round: &Round, means: &Means) {
        self.rounds.push(Measured {
            rows: means.rows,
            control: control(round),
            io_of_calls: means.io_of_calls,
        });
    }

    /// Adds QEMU's own time from the kick to the interrupt, by its events. Each step is the time
    /// since the previous one. The first step, from the previous interrupt to the kick, is not
    /// QEMU's.
    pub(crate) fn add_qemu(&mut self, round: &Round, steps: &[QemuStep]) {
        let seen = |step: &&QemuStep| step.time.count > 0;
        let within = || steps.iter().skip(1).filter(seen);
        let mut measured = Measured {
            control: control(round),
            ..Measured::default()
        };
        measured.rows[Row::Server as usize] = Mean {
            sum: within().map(|step| step.time.mean).sum(),
            count: u64::from(within().next().is_some()),
        };
        self.qemu = Some(measured);
    }

    /// Returns the rounds whose rows are shown: those with the most rows.
    fn best(&self) -> Vec<&Measured> {
        let count = |round: &&Measured| round.has().into_iter().filter(|&has| has).count();
        let rounds = self.rounds.iter().filter(|round| count(round) > 0);
        // The first of several equals.
        let best = rounds.rev().max_by_key(count);
        let Some(best) = best.map(Measured::has) else {
            return Vec::new();
        };
        let same = |round: &&Measured| round.has() == best;
        self.rounds.iter().filter(same).collect()
    }

    /// Returns the two tables; None if only benchmarks were measured.
    pub(crate) fn finish(self, run: &Run) -> Option<Wiki> {
        let best = self.best();
        let of_qemu = self.qemu.as_ref().filter(|qemu| qemu.has().contains(&true));
        if best.is_empty() && of_qemu.is_none() {
            return None;
        }
        let control = average(best.iter().filter_map(|round| round.control));
        let by_calls = !best.is_empty() && best.iter().all(|round| round.io_of_calls);
        let names = names(run, by_calls);
        let mut shown = vec![Shown::new("Guest benchmark", benchmark(run, control), None)];
        for row in ROWS {
            let mean = average(
                best.iter()
                    .filter_map(|round| round.rows[row as usize].value()),
            );
            shown.push(Shown::new(&names[row as usize], mean, control));
        }
        let deltas = deltas(&shown, &server(run));
        let mut notes = Vec::new();
        if let Some(qemu) = of_qemu {
            notes.extend(add_events(&mut shown, qemu));
        }
        let on_host = run.rounds.iter().filter(|round| round.on_host);
        let host = average(on_host.filter_map(|round| Some(round.benchmark.as_ref()?.mean_ns)));
        shown.push(Shown::new("Host benchmark", host, None));
        let missing = shown.iter().filter(|row| row.mean.is_none());
        let missing: Vec<_> = missing.map(|row| row.name.as_str()).collect();
        if !missing.is_empty() {
            notes.push(format!("{}: not measured in any round", missing.join(", ")));
        }
        notes.extend(caveats(run));
        notes.extend(why_negative(&deltas, &best, &names));
        let rows = shown.into_iter();
        Some(Wiki {
            cumulative: rows
                .filter_map(|row| Some((row.name, row.mean?, row.control)))
                .collect(),
            delta: deltas,
            notes,
        })
    }
}

/// A row of the cumulative table.
#[derive(Clone, Debug)]
struct Shown {
    name: String,
    mean: Option<f64>,
    control: Option<f64>,
}

impl Shown {
    fn new(name: &str, mean: Option<f64>, control: Option<f64>) -> Shown {
        Shown {
            name: name.to_owned(),
            mean,
            control,
        }
    }
}

fn control(round: &Round) -> Option<f64> {
    round.benchmark.as_ref().map(|benchmark| benchmark.mean_ns)
}

/// Returns the benchmark's mean from the rounds of the rows; else from the untraced rounds.
fn benchmark(run: &Run, control: Option<f64>) -> Option<f64> {
    let untraced = run
        .rounds
        .iter()
        .filter(|round| !round.on_host && round.traced.is_empty())
        .filter_map(|round| Some(round.benchmark.as_ref()?.mean_ns));
    control.or_else(|| average(untraced))
}

/// Adds the row of QEMU's own events, which have a separate round. The row is shown if no other
/// round measured it, and is not subtracted from other rows. Returns a note about it.
fn add_events(shown: &mut [Shown], qemu: &Measured) -> Option<String> {
    let row = &mut shown[1 + Row::Server as usize];
    let mean = qemu.rows[Row::Server as usize].value()?;
    let round = match qemu.control {
        Some(control) => format!("a round of its own in which a request took {control:.0} ns"),
        None => "a round of its own".to_owned(),
    };
    let name = &row.name;
    if row.mean.is_some() {
        return Some(format!(
            "{name} is from the return of the wait that the kick ended to the interrupt; by QEMU's \
             own events, in {round}, it took {mean:.0} ns"
        ));
    }
    let note = format!(
        "{name} is from {round}: rows of rounds that cost differently are not subtracted from each \
         other, so the layers on both its sides are one"
    );
    (row.mean, row.control) = (Some(mean), qemu.control);
    Some(note)
}

fn caveats(run: &Run) -> Vec<String> {
    let mut notes = Vec::new();
    if run.scenario.as_ref().is_some_and(|s| s.iodepth > 1) {
        notes.push(
            "the wiki's arithmetic is for one request at a time: with more in flight, read the \
             exact breakdown"
                .into(),
        );
    }
    if run.scenario.as_ref().is_some_and(|s| s.polling) {
        notes.push("the server polls: not every request has a kick to measure from".into());
    }
    notes
}

/// Returns the reason for negative layers, which the table shows as they are.
fn why_negative(
    deltas: &[(String, f64, f64)],
    best: &[&Measured],
    names: &[String; 4],
) -> Option<String> {
    let negative = deltas.iter().filter(|(_, delta, _)| *delta < 0.0);
    let negative: Vec<&str> = negative.map(|(name, ..)| name.as_str()).collect();
    if negative.is_empty() {
        return None;
    }
    let counted = ROWS.map(|row| {
        let of = |round: &&Measured| round.rows[row as usize].count;
        let count: u64 = best.iter().map(of).sum();
        format!("{} of {count}", names[row as usize])
    });
    Some(format!(
        "{} came out negative: the rows are means of different events ({}), and the one inside is \
         greater than the one around it",
        negative.join(", "),
        counted.join(", ")
    ))
}

fn average(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Returns the name of the disk's server in the wiki's rows.
fn server(run: &Run) -> String {
    let server = run.scenario.as_ref().map(|s| s.server.as_str());
    let device = run.disk().map(|disk| disk.device.as_str());
    match (server, device) {
        (Some("fathom"), _) => "Fathom",
        (Some("qsd"), _) => "QSD",
        (Some("qemu"), _) => "QEMU",
        (_, Some("vhost-user-blk" | "fathom")) => "Fathom",
        _ => "QEMU",
    }
    .into()
}

fn names(run: &Run, by_calls: bool) -> [String; 4] {
    let server = server(run);
    let threads = run.scenario.as_ref().is_some_and(|s| s.aio == "threads");
    let io = match server == "QEMU" && threads && by_calls {
        true => "QEMU paio".into(),
        false => "Host I/O".into(),
    };
    // A disk that was recorded at its server may have other clients than guests.
    let served = match run.disk().is_some_and(|disk| disk.device == "fathom") {
        true => server,
        false => format!("{server} virtio"),
    };
    ["Guest virtio-pci".into(), "Host kvm.ko".into(), served, io]
}

/// Returns differences of successive rows; the layers around a missing row become one.
fn deltas(rows: &[Shown], server: &str) -> Vec<(String, f64, f64)> {
    let layers = [
        "Guest".into(),
        "Host/guest switching".into(),
        format!("Host/{server} switching"),
        server.to_owned(),
        "Host I/O".into(),
    ];
    let Some(whole) = rows.first().and_then(|row| row.mean) else {
        return Vec::new();
    };
    let mut out = Vec::new();
    let (mut name, mut from) = (String::new(), None);
    for (i, row) in rows.iter().enumerate() {
        if let (Some(from), Some(to)) = (from, row.mean) {
            let delta: f64 = from - to;
            out.push((std::mem::take(&mut name), delta, delta / whole * 100.0));
        }
        from = row.mean.or(from);
        if !name.is_empty() {
            name.push_str(" + ");
        }
        name.push_str(&layers[i]);
    }
    if let Some(rest) = from {
        out.push((name, rest, rest / whole * 100.0));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wiki's own figures give the wiki's own differences.
    #[test]
    fn the_wikis_table_comes_out_of_the_wikis_figures() {
        let row = |name: &str, mean| Shown::new(name, Some(mean), None);
        let rows = [
            row("Guest benchmark", 196_528.0),
            row("Guest virtio-pci", 170_829.0),
            row("Host kvm.ko", 163_268.0),
            row("QEMU virtio", 159_628.0),
            row("QEMU paio", 130_235.0),
        ];
        let told: Vec<(String, i64, String)> = deltas(&rows, "QEMU")
            .into_iter()
            .map(|(name, ns, percent)| (name, ns as i64, format!("{percent:.2}")))
            .collect();
        let wiki = [
            ("Guest", 25_699, "13.08"),
            ("Host/guest switching", 7_561, "3.85"),
            ("Host/QEMU switching", 3_640, "1.85"),
            ("QEMU", 29_393, "14.96"),
            ("Host I/O", 130_235, "66.27"),
        ];
        for (told, (name, ns, percent)) in told.iter().zip(wiki) {
            assert_eq!(
                (told.0.as_str(), told.1, told.2.as_str()),
                (name, ns, percent)
            );
        }
        assert_eq!(told.len(), 5);
    }

    #[test]
    fn layers_around_a_missing_row_are_one() {
        let row = |mean| Shown::new("", mean, None);
        let rows = [Some(100.0), Some(90.0), None, Some(70.0), Some(50.0)].map(row);
        let told = deltas(&rows, "Fathom");
        assert_eq!(told[1].0, "Host/guest switching + Host/Fathom switching");
        assert_eq!(told[1].1, 20.0);
        assert_eq!(told.iter().map(|(_, ns, _)| ns).sum::<f64>(), 100.0);
    }

    #[test]
    fn a_disk_recorded_at_its_server_is_fathoms() {
        let mut served = run();
        served.scenario = None;
        served.disks = vec![fathom_run::Disk {
            under_test: true,
            device: "fathom".into(),
            ..fathom_run::Disk::default()
        }];
        assert_eq!(server(&served), "Fathom");
        assert_eq!(names(&served, false)[2], "Fathom");
        served.disks[0].device = "virtio-blk".into();
        assert_eq!(names(&served, false)[2], "QEMU virtio");
    }

    fn run() -> Run {
        Run {
            version: fathom_run::VERSION,
            kind: fathom_run::RunKind::Lab,
            title: String::new(),
            created: 0,
            experiment: None,
            scenario: Some(fathom_run::Scenario {
                server: "qemu".into(),
                iodepth: 1,
                ..fathom_run::Scenario::default()
            }),
            environment: fathom_run::Environment::default(),
            disks: Vec::new(),
            threads: Vec::new(),
            rounds: Vec::new(),
            problems: Vec::new(),
        }
    }

    fn measured(control: f64, rows: [f64; 4]) -> Measured {
        let mean = |sum: f64| Mean {
            sum,
            count: u64::from(sum > 0.0),
        };
        Measured {
            rows: rows.map(mean),
            control: Some(control),
            io_of_calls: false,
        }
    }

    /// QEMU's log makes each request slower: its row would make the switching negative.
    #[test]
    fn rows_of_rounds_that_cost_differently_are_not_subtracted() {
        let qemu = measured(200.0, [0.0, 0.0, 150.0, 0.0]);
        let table = Table {
            rounds: vec![
                measured(100.0, [90.0, 80.0, 0.0, 40.0]),
                measured(104.0, [92.0, 84.0, 0.0, 44.0]),
                measured(500.0, [0.0, 400.0, 0.0, 0.0]), // without the guest's row
            ],
            qemu: Some(qemu.clone()),
        };
        let wiki = table.finish(&run()).unwrap();
        let layers: Vec<(&str, f64)> = wiki.delta.iter().map(|(n, ns, _)| (&**n, *ns)).collect();
        let wanted = [
            ("Guest", 11.0),
            ("Host/guest switching", 9.0),
            ("Host/QEMU switching + QEMU", 40.0),
            ("Host I/O", 42.0),
        ];
        assert_eq!(layers, wanted);
        let server = ("QEMU virtio".to_owned(), 150.0, Some(200.0));
        assert_eq!(wiki.cumulative[3], server);
        let said = |wiki: &Wiki, words: &str| wiki.notes.iter().any(|note| note.contains(words));
        assert!(said(&wiki, "not subtracted"), "{:?}", wiki.notes);
        // If the same rounds measured the row, QEMU's own round is only a note.
        let table = Table {
            rounds: vec![measured(100.0, [90.0, 80.0, 70.0, 40.0])],
            qemu: Some(qemu),
        };
        let wiki = table.finish(&run()).unwrap();
        assert_eq!(wiki.delta[2], ("Host/QEMU switching".into(), 10.0, 10.0));
        assert!(said(&wiki, "it took 150 ns"), "{:?}", wiki.notes);
    }

    #[test]
    fn what_is_missing_is_told_in_one_note() {
        let table = Table {
            rounds: vec![measured(100.0, [0.0, 0.0, 85.0, 40.0])],
            qemu: None,
        };
        let notes = table.finish(&run()).unwrap().notes;
        let notes = notes.iter().filter(|note| note.contains("not measured"));
        let notes: Vec<_> = notes.map(String::as_str).collect();
        let all = "Guest virtio-pci, Host kvm.ko, Host benchmark";
        assert_eq!(notes, [format!("{all}: not measured in any round")]);
    }

    #[test]
    fn a_negative_layer_is_shown_with_its_reason() {
        let table = Table {
            rounds: vec![measured(100.0, [90.0, 80.0, 85.0, 40.0])],
            qemu: None,
        };
        let wiki = table.finish(&run()).unwrap();
        assert_eq!(wiki.delta[2], ("Host/QEMU switching".into(), -5.0, -5.0));
        let sum: f64 = wiki.delta.iter().map(|(_, ns, _)| ns).sum();
        assert_eq!(sum, 100.0);
        let note = wiki.notes.iter().find(|note| note.contains("negative"));
        let note = note.expect("a reason");
        assert!(
            note.starts_with("Host/QEMU switching came out negative"),
            "{note}"
        );
        assert!(note.contains("QEMU virtio of 1"), "{note}");
    }
}
