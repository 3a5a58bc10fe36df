//! CPU profiles of cells whose CPUs were sampled, by any experiment. The cells' folders hold folded
//! stacks.

mod flame;
pub(super) mod html;
pub(super) mod terminal;

use std::collections::BTreeMap;
use std::path::Path;

use fathom_run::evidence::LockWait;
use fathom_run::folded::{QEMU, SERVER, parts};
use fathom_run::{Folded, Planned, Side};
use serde::Serialize;

use super::cell::{Problems, Row, name};

/// Maximum number of symbols listed for each side.
const MOST_SYMBOLS: usize = 20;
/// Maximum number of locks listed for a point.
const MOST_LOCKS: usize = 20;

/// The samples of one side's CPUs, from all of a point's cells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sampled {
    /// `guest` or `host`.
    pub side: &'static str,
    /// Number of samples of CPUs that were not idle.
    pub samples: u64,
    /// The symbols with the most samples.
    pub top: Vec<Symbol>,
    #[serde(skip)]
    pub(super) folded: Folded,
}

/// A line of the symbol table, as in perf's report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Symbol {
    /// Percent of the side's samples that ran the symbol itself, without its callees.
    pub overhead: f64,
    /// The thread's name.
    pub command: String,
    /// Object that contains the symbol, such as `libc.so.6` or `kernel`.
    pub object: String,
    /// Name of the function that ran.
    pub symbol: String,
}

/// Reads the profiles of a point's cells; cells that did not finish are left out.
pub(super) fn load(
    run: &Path,
    planned: &[&Planned],
    rows: &[Row],
    problems: &mut Problems,
) -> Vec<Sampled> {
    let done = |planned: &&&Planned| rows.iter().any(|row| row.round == planned.round);
    let mut sampled = Vec::new();
    for side in Side::ALL {
        let mut folded = Folded::default();
        for planned in planned.iter().filter(done) {
            match Folded::load(run, planned, side) {
                Ok(Some(one)) => folded.merge(&one),
                Ok(None) => {}
                Err(_) => {
                    let id = name(&planned.id);
                    problems.say(format!("cell {id}: {} cannot be read", side.file()));
                }
            }
        }
        if !folded.is_empty() {
            sampled.push(Sampled {
                side: side.name(),
                samples: folded.total(),
                top: top(&folded),
                folded,
            });
        }
    }
    sampled
}

fn top(folded: &Folded) -> Vec<Symbol> {
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for (stack, count) in folded.stacks() {
        let (command, innermost) = match stack.as_slice() {
            [command] => (*command, ""),
            [command, .., innermost] => (*command, *innermost),
            [] => continue,
        };
        let sum = counts.entry((command, innermost)).or_default();
        *sum = sum.saturating_add(count);
    }
    let total = folded.total().max(1) as f64;
    let mut counts: Vec<_> = counts.into_iter().collect();
    // A stable sort: equal counts stay in order of names.
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let symbol = |((command, innermost), count): ((&str, &str), u64)| {
        let (symbol, object) = parts(innermost);
        Symbol {
            overhead: count as f64 / total * 100.0,
            command: name(command),
            object: name(object),
            symbol: name(symbol),
        }
    };
    counts.into_iter().take(MOST_SYMBOLS).map(symbol).collect()
}

/// Returns the locks of all of a point's rounds, longest total wait first.
pub(super) fn locks(rows: &[Row]) -> Vec<LockWait> {
    let mut locks: BTreeMap<(String, String), (u64, f64)> = BTreeMap::new();
    for one in rows.iter().flat_map(|row| &row.locks) {
        if one.seconds.is_finite() {
            let (waits, seconds) = locks.entry((name(&one.side), name(&one.name))).or_default();
            *waits = waits.saturating_add(one.waits);
            *seconds += one.seconds;
        }
    }
    let lock = |((side, name), (waits, seconds))| LockWait {
        name,
        side,
        waits,
        seconds,
    };
    let mut locks: Vec<LockWait> = locks.into_iter().map(lock).collect();
    locks.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    locks.truncate(MOST_LOCKS);
    locks
}

/// Returns the parts of the stacks that have their own flame graph, each with its heading.
fn parts_of(sampled: &Sampled) -> Vec<(&'static str, Folded)> {
    if sampled.side == Side::Guest.name() {
        return vec![("Guest", sampled.folded.clone())];
    }
    let part = |title, is_wanted: &dyn Fn(&str) -> bool| (title, sampled.folded.filter(is_wanted));
    let is_qemu = |command: &str| command.starts_with(QEMU);
    let is_server = |command: &str| command.starts_with(SERVER);
    let mut parts = vec![
        part("QEMU, on the host", &is_qemu),
        part("The disk's server, on the host", &is_server),
        part("The rest of the host", &|command| {
            !is_qemu(command) && !is_server(command)
        }),
    ];
    parts.retain(|(_, folded)| !folded.is_empty());
    parts
}
