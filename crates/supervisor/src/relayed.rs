//! Checks events of tenants, which are shown to everybody who watches the server.
//!
//! A tenant reports events of its own disks, and errors under its own name. A tenant cannot report
//! that the server has reloaded its configuration, or that another tenant was restarted. A tenant
//! that reports too many events loses its own events, not those of others.

use fathom_metrics::Happened;
use fathom_metrics::one_line;
use fathom_trace::SlowRequest;
use std::time::{Duration, Instant};

/// Number of events that a tenant which was silent for a while may report at once.
const BURST: u32 = 256;
/// Time after which a tenant may report one more event.
const EACH: Duration = Duration::from_millis(50);
/// Maximum bytes of a text in an event.
const MAX_TEXT: usize = 1024;
/// Maximum number of slow requests in an alarm, and of stages in each.
const MAX_REQUESTS: usize = 16;

/// Checks and limits the events of one tenant.
pub struct Relay {
    tenant: String,
    budget: u32,
    since: Instant,
    /// Number of dropped events that have not been reported yet.
    left_out: u64,
}

impl Relay {
    pub fn new(tenant: &str) -> Relay {
        Relay {
            tenant: tenant.to_owned(),
            budget: BURST,
            since: Instant::now(),
            left_out: 0,
        }
    }

    /// Calls `tell` with the part of an event that others may see. `has`: whether the tenant has a
    /// disk.
    pub fn pass(
        &mut self,
        happened: Happened,
        has: impl FnOnce(&str) -> bool,
        now: Instant,
        tell: impl Fn(Happened),
    ) {
        let Some(happened) = self.checked(happened, has) else {
            return;
        };
        let more = now.saturating_duration_since(self.since).as_millis() / EACH.as_millis();
        if more > 0 {
            self.since = now;
            self.budget = (self.budget + more.min(BURST.into()) as u32).min(BURST);
        }
        match self.budget {
            0 => return self.left_out += 1,
            _ => self.budget -= 1,
        }
        if self.left_out > 0 {
            let text = format!(
                "{} events were dropped because there were too many",
                self.left_out
            );
            self.left_out = 0;
            tell(self.error(&text));
        }
        tell(happened);
    }

    fn error(&self, text: &str) -> Happened {
        let text = format!("tenant '{}': {}", self.tenant, one_line(text, MAX_TEXT));
        Happened::Error { text }
    }

    /// Returns a checked event. None: the event must not be shown.
    fn checked(&self, happened: Happened, has: impl FnOnce(&str) -> bool) -> Option<Happened> {
        let mut happened = match happened {
            Happened::Error { text } => return Some(self.error(&text)),
            Happened::Lost { count } => {
                return Some(self.error(&format!("{count} events were lost")));
            }
            // Only the supervisor reports these events.
            Happened::Restarted { .. } | Happened::Reloaded => return None,
            of_disk => of_disk,
        };
        if !happened.disk().is_some_and(has) {
            return None;
        }
        clean(&mut happened);
        Some(happened)
    }
}

fn clean(happened: &mut Happened) {
    let shorten = |text: &mut String| *text = one_line(text, MAX_TEXT);
    match happened {
        Happened::Added { .. }
        | Happened::Removed { .. }
        | Happened::Changed { .. }
        | Happened::Resized { .. }
        | Happened::BackupBegun { .. }
        | Happened::Restarted { .. }
        | Happened::Error { .. }
        | Happened::Reloaded
        | Happened::Lost { .. } => {}
        Happened::Pulled { phase, .. } => shorten(phase),
        Happened::BackupFailed { problem, .. } => shorten(problem),
        Happened::Mirrored { phase, problem, .. } | Happened::Streamed { phase, problem, .. } => {
            shorten(phase);
            problem.iter_mut().for_each(shorten);
        }
        Happened::Attached { client, .. } | Happened::Detached { client, .. } => shorten(client),
        Happened::Alarm {
            alarm,
            text,
            stage,
            requests,
            ..
        } => {
            [alarm, text, stage].into_iter().for_each(shorten);
            requests.truncate(MAX_REQUESTS);
            requests.iter_mut().for_each(clean_request);
        }
        Happened::AlarmOver { alarm, .. } => shorten(alarm),
    }
}

fn clean_request(request: &mut SlowRequest) {
    let shorten = |text: &mut String| *text = one_line(text, MAX_TEXT);
    [&mut request.id, &mut request.op, &mut request.longest]
        .into_iter()
        .for_each(shorten);
    let stages = std::mem::take(&mut request.stages).into_iter();
    let stages = stages
        .take(MAX_REQUESTS)
        .map(|(name, ns)| (one_line(&name, MAX_TEXT), ns));
    request.stages = stages.collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn pass(relay: &mut Relay, happened: Happened, now: Instant) -> Vec<Happened> {
        let told = RefCell::new(Vec::new());
        let has = |disk: &str| disk == "own";
        relay.pass(happened, has, now, |one| told.borrow_mut().push(one));
        told.into_inner()
    }

    fn error(text: &str) -> Vec<Happened> {
        vec![Happened::Error { text: text.into() }]
    }

    #[test]
    fn tenant_tells_of_its_own_disks_and_nothing_else() {
        let mut relay = Relay::new("vm");
        let now = Instant::now();
        let disk = || "own".to_owned();
        for forged in [
            Happened::Restarted {
                tenant: "other".into(),
            },
            Happened::Reloaded,
            Happened::Added {
                disk: "other".into(),
            },
        ] {
            assert_eq!(pass(&mut relay, forged, now), []);
        }
        let own = Happened::Resized {
            disk: disk(),
            size: 512,
        };
        assert_eq!(pass(&mut relay, own.clone(), now), [own]);
        let failed = Happened::BackupFailed {
            disk: disk(),
            problem: "\u{1b}[2Jx\n".into(),
        };
        let problem = "\\u{1b}[2Jx\\n".into();
        let shown = [Happened::BackupFailed {
            disk: disk(),
            problem,
        }];
        assert_eq!(pass(&mut relay, failed, now), shown);
    }

    #[test]
    fn errors_say_whose_they_are() {
        let mut relay = Relay::new("vm");
        let now = Instant::now();
        let forged = Happened::Error {
            text: "the server's disk is full\n".into(),
        };
        let told = pass(&mut relay, forged, now);
        assert_eq!(told, error("tenant 'vm': the server's disk is full\\n"));
        let told = pass(&mut relay, Happened::Lost { count: 7 }, now);
        assert_eq!(told, error("tenant 'vm': 7 events were lost"));
    }

    #[test]
    fn flood_is_bounded_and_counted() {
        let mut relay = Relay::new("vm");
        let begin = relay.since;
        let one = || Happened::Changed { disk: "own".into() };
        let told = (0..1000)
            .flat_map(|_| pass(&mut relay, one(), begin))
            .count();
        assert_eq!(told, BURST as usize);
        let told = pass(&mut relay, one(), begin + EACH);
        let left_out = 1000 - BURST;
        let text =
            format!("tenant 'vm': {left_out} events were dropped because there were too many");
        assert_eq!(told[0], error(&text)[0]);
        assert_eq!(told[1..], [one()]);
        assert_eq!(pass(&mut relay, one(), begin + EACH), []);
    }
}
