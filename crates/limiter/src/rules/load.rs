//! The load's own threads.

use fathom_run::evidence::{Evidence, ThreadRole};

use crate::figures::{
    SATURATED, largest, load_in_flight, number, offered, percent, ratio, share, wanting, working,
};
use crate::rule::Finding;

/// Minimum share of the offered requests that are in flight. A load with less is mostly busy with
/// something else, so the limit of its requests is not its own limit.
const KEPT: f64 = 0.50;

/// Holds if the load's threads are on a CPU all the time, and no thread of the server is. A vCPU
/// may be, since the load runs in it.
pub fn saturated(evidence: &Evidence) -> Option<Finding> {
    let shares = shares(evidence);
    let most = shares.iter().copied().max_by(f64::total_cmp)?;
    if evidence.load.polls || most < SATURATED {
        return pace(evidence);
    }
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let whose = match shares.len() {
        1 => "the load's own thread".to_owned(),
        count => format!("the load's own {count} threads"),
    };
    if mean < SATURATED {
        let text = format!(
            "{whose}: on CPU {} each, the busiest {}",
            percent(mean),
            percent(most)
        );
        return Some(Finding::weak(text));
    }
    let text = format!("{whose}: on CPU {}", percent(mean));
    Some(
        match largest(evidence, serves, |one| working(evidence, one)) {
            Some((server, _)) if server >= SATURATED => Finding::weak(text),
            Some((server, _)) => {
                Finding::verdict(format!("{text}, the server's busiest {}", percent(server)))
            }
            None => Finding::verdict(text),
        },
    )
}

/// Suspects a load that does not keep enough requests in flight.
fn pace(evidence: &Evidence) -> Option<Finding> {
    let (had, offered) = (load_in_flight(evidence)?, offered(&evidence.load)?);
    let text = format!(
        "the load's own pace: it had {} of {} in flight",
        number(had),
        number(offered)
    );
    (ratio(had, offered)? < KEPT).then(|| Finding::weak(text))
}

/// Returns the CPU share of each load thread, as reported by the load or as measured for its
/// process.
fn shares(evidence: &Evidence) -> Vec<f64> {
    let told = evidence.load.thread_cpu.iter();
    let told: Vec<f64> = told
        .filter_map(|&cpu| share(cpu, evidence.load_seconds()))
        .collect();
    if !told.is_empty() {
        return told;
    }
    let threads = evidence.threads.iter();
    let own = threads.filter(|one| one.role == ThreadRole::Load);
    own.filter_map(|one| wanting(evidence, one)).collect()
}

fn serves(role: ThreadRole) -> bool {
    use ThreadRole::{Io, Kernel, Main, Pool};
    matches!(role, Io | Main | Pool | Kernel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};

    /// A cell whose load threads and worker used these numbers of seconds of 10 s.
    fn load(threads: &[f64], worker: f64) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            evidence.load.thread_cpu = threads.to_vec();
            evidence.threads[1].cpu = worker;
        })
    }

    #[test]
    fn a_load_that_is_busy_in_front_of_an_idle_server_is_the_limit() {
        let finding = saturated(&load(&[9.9], 4.0)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "the load's own thread: on CPU 99%, the server's busiest 40%"
        );
        assert!(saturated(&load(&[9.51, 9.5], 4.0)).unwrap().holds());
        assert!(saturated(&load(&[9.49], 4.0)).is_none());
        assert!(!saturated(&load(&[9.9], 9.6)).unwrap().holds());
        assert!(
            !saturated(&load(&[9.9, 2.0], 4.0)).unwrap().holds(),
            "one of two"
        );
    }

    #[test]
    fn a_load_that_polls_is_always_on_a_cpu() {
        let polls = with(load(&[10.0], 4.0), |evidence| evidence.load.polls = true);
        assert!(saturated(&polls).is_none());
    }

    #[test]
    fn a_load_on_the_host_shows_by_itself() {
        let host = with(load(&[], 4.0), |evidence| {
            evidence.threads[0].role = ThreadRole::Load;
            evidence.threads[0].vcpu = None;
            evidence.threads[0].cpu = 9.8;
        });
        assert!(saturated(&host).unwrap().holds());
    }

    #[test]
    fn a_load_with_a_pace_of_its_own_is_worth_a_line() {
        let slow = with(load(&[1.0], 1.0), |evidence| evidence.load.requests /= 4);
        let finding = saturated(&slow).unwrap();
        assert!(
            !finding.holds() && finding.text.contains("7.9 of 32"),
            "{}",
            finding.text
        );
    }
}
