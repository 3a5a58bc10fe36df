//! The load's own threads, and its own pace.

use fathom_run::evidence::{Evidence, ThreadRole};

use crate::figures::{
    KEPT, SATURATED, largest, load_in_flight, number, offered, percent, possible, ratio, share,
    wanting, working,
};
use crate::rule::Finding;

/// Holds if the load's threads are on a CPU all the time, and no thread of the server is. A vCPU
/// may be, since the load runs in it.
///
/// ```text
/// mean CPU share of the load's threads      >= 0.95   [seconds per second of the load]
/// CPU share of the server's busiest thread  <  0.95   [seconds per second of the window]
/// ```
pub fn saturated(evidence: &Evidence) -> Option<Finding> {
    let shares = shares(evidence);
    let most = shares.iter().copied().max_by(f64::total_cmp)?;
    if evidence.load.polls || most < SATURATED {
        return None;
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

/// Holds if the client keeps few requests in flight, so that the disk waits for it:
///
/// ```text
/// in flight / offered < 0.5   [requests, over the load's own seconds]
/// ```
///
/// A load that is known only from its disk offers one request. The disk sees all requests, but a
/// load generator may not count its flushes. Therefore its own figures are enough only if the disk
/// has seen the same requests, which the layers prove.
pub fn pace(evidence: &Evidence) -> Option<Finding> {
    let had = load_in_flight(evidence)?;
    let offered = offered(&evidence.load);
    if ratio(had, possible(&evidence.load)?)? >= KEPT {
        return None;
    }
    let had = match had {
        had if had < 0.005 => "less than 0.01".into(),
        had if had < 0.095 => format!("{had:.2}"),
        had => number(had),
    };
    let is_all = offered.is_none() || !evidence.layers.is_empty();
    Some(match offered {
        None => Finding::verdict(format!("client: keeps {had} requests in flight")),
        Some(offered) if is_all => {
            let offered = number(offered);
            Finding::verdict(format!(
                "client: keeps {had} of {offered} requests in flight"
            ))
        }
        Some(offered) => Finding::unseen(format!(
            "what the load did between its requests: its own pace, or flushes that it does not \
             count (it had {had} of {} in flight)",
            number(offered)
        )),
    })
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
    use crate::rule::Strength;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Layer;

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
    fn a_client_that_keeps_few_requests_in_flight_is_the_limit() {
        let slow = with(load(&[1.0], 1.0), |evidence| evidence.load.requests /= 4);
        let finding = pace(&slow).unwrap();
        assert_eq!(finding.strength, Strength::Unseen);
        assert!(finding.text.ends_with("(it had 7.9 of 32 in flight)"));
        assert!(pace(&load(&[1.0], 1.0)).is_none());
        // The disk has seen the same requests.
        let seen = with(slow.clone(), |evidence| {
            evidence.layers.push(Layer {
                name: "host: device".into(),
                mean_ns: 4e5,
            });
        });
        let text = pace(&seen).unwrap().text;
        assert_eq!(text, "client: keeps 7.9 of 32 requests in flight");
        let from_disk = with(slow, |evidence| {
            (evidence.load.threads, evidence.load.depth) = (0, 0);
            evidence.load.requests /= 40;
        });
        let finding = pace(&from_disk).unwrap();
        assert!(finding.holds());
        assert_eq!(finding.text, "client: keeps 0.2 requests in flight");
        let few = |part: u64| {
            let few = with(from_disk.clone(), |evidence| evidence.load.requests /= part);
            pace(&few).unwrap().text
        };
        assert_eq!(few(10), "client: keeps 0.02 requests in flight");
        assert_eq!(few(100), "client: keeps less than 0.01 requests in flight");
        // The time of a request is not known.
        let untimed = with(from_disk, |evidence| evidence.load.mean_ns = 0.0);
        assert!(pace(&untimed).is_none());
    }
}
