//! Breadth-first exploration of a world.

use crate::world::World;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write;

/// The result of an exploration.
pub struct Explored {
    /// Number of distinct states.
    pub states: usize,
    /// Whether states were omitted because there were too many.
    pub is_cut: bool,
    /// The first violation of a property, with the shortest path to it.
    pub violation: Option<String>,
}

/// Maximum number of states: enough for all scenarios, in less than a minute.
///
/// `make torture` sets a larger number.
fn max_states() -> usize {
    let set = std::env::var("FATHOM_MODEL_STATES");
    set.ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(150_000)
}

/// Explores all reachable states.
pub fn explore(world: World) -> Explored {
    let max_states = max_states();
    let mut ways: HashMap<u64, (u64, String)> = HashMap::new();
    let start = world.fingerprint();
    ways.insert(start, (start, String::new()));
    let mut queue = VecDeque::from([(start, world)]);
    let mut is_cut = false;
    while let Some((from, world)) = queue.pop_front() {
        for step in world.steps() {
            let mut next = world.clone();
            let violation = next.apply(&step).err();
            let to = next.fingerprint();
            let is_new = !ways.contains_key(&to);
            if is_new || violation.is_some() {
                ways.entry(to).or_insert((from, format!("{step:?}")));
            }
            if let Some(problem) = violation {
                let way = way_to(&ways, from);
                return Explored {
                    states: ways.len(),
                    is_cut,
                    violation: Some(format!("{problem}, after{way}\n  {step:?}")),
                };
            }
            match (is_new, ways.len() < max_states) {
                (true, true) => queue.push_back((to, next)),
                (true, false) => is_cut = true,
                (false, _) => {}
            }
        }
    }
    Explored {
        states: ways.len(),
        is_cut,
        violation: None,
    }
}

/// Returns the steps to a state, one per line.
fn way_to(ways: &HashMap<u64, (u64, String)>, mut state: u64) -> String {
    let mut steps = Vec::new();
    while let Some((from, step)) = ways.get(&state)
        && *from != state
    {
        steps.push(step);
        state = *from;
    }
    let mut text = String::new();
    for step in steps.iter().rev() {
        let _ = write!(text, "\n  {step}");
    }
    text
}
