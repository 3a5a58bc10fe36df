//! Evidence and suspected limiter of a load by `fathom bench`, which sees only itself.

use fathom_load::{Report, files};
use fathom_run::evidence::{Evidence, Load};

use super::Worked;

/// Returns the evidence of a load on a server or a file.
pub fn evidence(report: &Report) -> Evidence {
    let requests: u64 = report.operations.iter().map(|one| one.ios).sum();
    let times = { report.operations.iter() }.map(|one| one.latency.mean_ns * one.ios as f64);
    let queues = f64::from(report.queues.max(1));
    let cpu = report.client_cpu_us_per_request * requests as f64 / 1e6;
    let load = Load {
        threads: report.queues.into(),
        depth: report.iodepth.into(),
        requests,
        bytes: (report.mb_per_s * 1e6 * report.runtime) as u64,
        seconds: report.runtime,
        mean_ns: times.sum::<f64>() / requests.max(1) as f64,
        thread_cpu: vec![cpu / queues; report.queues.into()],
        polls: report.wait == "poll",
    };
    of(load)
}

/// Returns the evidence of a load on the files of a directory.
pub fn evidence_of_files(report: &files::Report) -> Evidence {
    of(Worked::of_files(report).load)
}

fn of(load: Load) -> Evidence {
    Evidence {
        seconds: load.seconds,
        load,
        ..Evidence::default()
    }
}

/// Returns the sentence that begins the result of a load: its limiter, and its rate.
pub fn answer(evidence: &Evidence) -> String {
    let verdict = fathom_limiter::judge(evidence);
    let load = &evidence.load;
    let rate = load.requests as f64 / load.seconds.max(1e-9);
    let rate = format!("{rate:.0} requests per second");
    match verdict.rule() {
        Some(_) => format!("Limited by {}; {rate}.", verdict.line()),
        None => format!("{rate}; the limiter is {}.", verdict.line()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(cpu: f64) -> Evidence {
        of(Load {
            threads: 1,
            depth: 8,
            requests: 100_000,
            seconds: 10.0,
            mean_ns: 790_000.0,
            thread_cpu: vec![cpu],
            ..Load::default()
        })
    }

    #[test]
    fn the_answer_has_limiter_and_rate() {
        let busy = answer(&load(9.9));
        let words = "Limited by load-thread: the load's own thread: on CPU 99%; 10000 requests";
        assert!(busy.starts_with(words), "{busy}");
        // The load does not see the time within the server.
        let idle = answer(&load(2.0));
        let words = "10000 requests per second; the limiter is unknown, not seen: ";
        assert!(idle.starts_with(words), "{idle}");
    }
}
