//! Describes the available and the missing evidence if no rule holds.

use fathom_run::evidence::Evidence;

use crate::device_part::{device_in_flight, device_share};
use crate::figures::{
    largest, load_in_flight, number, offered, on_path, percent, share, thread, working,
};

/// Returns one line that begins with `unknown`. `unseen` is the evidence without which rules could
/// not hold.
pub fn text(evidence: &Evidence, unseen: &[String]) -> String {
    let seen = [
        busiest(evidence),
        load(evidence),
        device(evidence),
        host(evidence),
    ];
    let seen: Vec<String> = seen.into_iter().flatten().collect();
    match (unseen.is_empty(), seen.is_empty()) {
        (true, true) => "unknown: nothing was seen that a rule could use".into(),
        (true, false) => format!("unknown: {}", seen.join("; ")),
        (false, true) => format!("unknown, not seen: {}", unseen.join(", and ")),
        (false, false) => {
            format!(
                "unknown, not seen: {}; seen: {}",
                unseen.join(", and "),
                seen.join("; ")
            )
        }
    }
}

fn busiest(evidence: &Evidence) -> Option<String> {
    let (share, busiest) = largest(evidence, on_path, |one| working(evidence, one))?;
    Some(format!(
        "busiest {} on CPU {}",
        thread(busiest),
        percent(share)
    ))
}

fn load(evidence: &Evidence) -> Option<String> {
    let (had, offered) = (load_in_flight(evidence)?, offered(&evidence.load)?);
    let (had, offered) = (number(had), number(offered));
    Some(format!("the load had {had} of {offered} in flight"))
}

fn device(evidence: &Evidence) -> Option<String> {
    let in_flight = device_in_flight(evidence)?;
    let of_time = device_share(evidence).map_or_else(String::new, |share| {
        format!(" ({} of the request's time)", percent(share))
    });
    Some(format!("the device {}{of_time}", number(in_flight)))
}

fn host(evidence: &Evidence) -> Option<String> {
    let busy = &evidence.host.as_ref()?.busy;
    let busy = share(busy.iter().sum(), busy.len() as f64 * 100.0)?;
    Some(format!("the host's CPUs {} busy", percent(busy)))
}
