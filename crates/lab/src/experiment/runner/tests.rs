use std::sync::Mutex;

use super::*;
use crate::experiment::{Kind, Parameter, Yield};
use run::{Better, Measure, Unit};

#[test]
fn times_are_said_roughly() {
    for (seconds, text) in [
        (0, "5s"),
        (7, "10s"),
        (61, "2m"),
        (3601, "70m"),
        (7200, "2h"),
    ] {
        assert_eq!(rough(Duration::from_secs(seconds)), text);
    }
}

#[test]
fn the_pace_is_that_of_the_cells_so_far() {
    let mut pace = Pace::default();
    let minute = Duration::from_secs(60);
    assert_eq!(pace.left(minute * 2), "about 2m left");
    pace.add(minute, minute * 3);
    assert_eq!(pace.left(minute * 2), "about 6m left");
}

#[test]
fn a_plan_of_somebody_elses_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let order = Order::new(find("seqread").unwrap());
    let resume = |change: &dyn Fn(&mut run::Experiment)| {
        let mut plan = order.plan().unwrap();
        change(&mut plan);
        new_run(order.experiment, plan).save(dir.path()).unwrap();
        Runner::resume(dir.path())
            .map(|runner| runner.left.len())
            .map_err(|e| e.to_string())
    };
    assert_eq!(resume(&|_| {}), Ok(1));
    let error = resume(&|plan| plan.name = "other".into()).unwrap_err();
    assert!(error.contains("no experiment 'other'"), "{error}");
    let set = |plan: &mut run::Experiment, name: &str, value: &str| {
        plan.cells[0].settings.insert(name.into(), value.into());
    };
    let error = resume(&|plan| set(plan, "size", "lots")).unwrap_err();
    assert!(error.contains("'lots' is not a size"), "{error}");
    let error = resume(&|plan| set(plan, "more", "1")).unwrap_err();
    assert!(error.contains("another version"), "{error}");
}

/// An experiment that only counts.
struct Counting;

/// Calls of its sessions, in order.
static CALLS: Mutex<Vec<String>> = Mutex::new(Vec::new());

const PARAMETERS: &[Parameter] = &[Parameter::new(
    "speed",
    "Speed",
    Kind::Count { least: 1, most: 9 },
    "1,2,3",
)];

impl Experiment for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn about(&self) -> &'static str {
        "A made-up experiment"
    }

    fn description(&self) -> &'static str {
        "It counts."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, _: &Settings) -> Result<()> {
        Ok(())
    }

    fn needs(&self, _: &Settings) -> Result<Vec<Need>> {
        Ok(Vec::new())
    }

    fn estimate(&self, _: &Settings) -> Duration {
        Duration::from_secs(1)
    }

    fn begin(&self, _: &Context) -> Box<dyn Session> {
        Box::new(Count)
    }
}

struct Count;

impl Session for Count {
    fn begin_round(&mut self, round: u32) {
        CALLS.lock().unwrap().push(format!("round {round}"));
    }

    fn cell(&mut self, settings: &Settings, _: &Path, _: &mut dyn FnMut(&str)) -> Result<Yield> {
        let speed = settings.text("speed").to_owned();
        let value = speed.parse().unwrap();
        CALLS.lock().unwrap().push(speed);
        Ok(Yield {
            measures: vec![Measure::new("rate", Unit::PerSecond, value, Better::Higher)],
            ..Yield::default()
        })
    }
}

#[test]
fn rounds_are_added_until_the_decision_is_the_end() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("run");
    let mut order = Order::new(&Counting);
    (order.rounds, order.seed) = (2, 5);
    let runner = Runner::new(&order, &dir).unwrap();
    let mut decisions = 0;
    let mut until = |dir: &Path| {
        let plan = Run::load(dir)?.experiment.unwrap();
        let done = plan.load_cells(dir)?.len();
        assert_eq!(done, plan.cells.len(), "all planned cells have run");
        decisions += 1;
        Ok(match plan.rounds {
            4 => Decision::End("four are enough".into()),
            _ => Decision::AnotherRound("too few".into()),
        })
    };
    let mut said = Vec::new();
    let mut progress = |step: &str| said.push(step.to_owned());
    runner
        .run(&Context::default(), Some(&mut until), &mut progress)
        .unwrap();
    assert_eq!(decisions, 3);
    let has = |words: &str| said.iter().any(|line| line == words);
    assert!(has("round 3 follows: too few"), "{said:?}");
    assert!(
        has("the run ends after 4 rounds: four are enough"),
        "{said:?}"
    );

    // The session gets the round of each cell; a round has every point once.
    let calls = std::mem::take(&mut *CALLS.lock().unwrap());
    assert_eq!(calls.len(), 2 * 3 * 4);
    for (round, cells) in (1..).zip(calls.chunks(6)) {
        let (rounds, mut speeds): (Vec<&String>, Vec<&String>) =
            cells.iter().partition(|text| text.starts_with("round"));
        speeds.sort();
        assert!(rounds.iter().all(|text| **text == format!("round {round}")));
        assert_eq!(speeds, ["1", "2", "3"]);
    }
    let saved = Run::load(&dir).unwrap().experiment.unwrap();
    let ended = saved.ended.as_deref();
    assert_eq!(ended, Some("after 4 rounds: four are enough"));
    order.rounds = 4;
    let cells = order.plan().unwrap().cells;
    assert_eq!(saved.cells, cells, "as if all rounds had been planned");
}

#[test]
fn a_finished_run_gets_more_rounds() {
    let dir = tempfile::tempdir().unwrap();
    let order = Order::new(find("seqread").unwrap());
    let plan = order.plan().unwrap();
    new_run(order.experiment, plan).save(dir.path()).unwrap();
    let mut runner = Runner::resume(dir.path()).unwrap();
    let error = runner.raise_rounds(1).unwrap_err().to_string();
    assert!(error.contains("the run has 1 already"), "{error}");
    runner.raise_rounds(3).unwrap();
    let ids: Vec<&str> = runner.left.iter().map(|cell| cell.id.as_str()).collect();
    assert_eq!(ids, ["1-1", "1-2", "1-3"]);
}
