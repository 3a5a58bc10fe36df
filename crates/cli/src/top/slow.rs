//! Slow requests of a disk, as its server reports them.

use super::words::time;
use fathom_trace::SlowRequest;
use fathom_units::Utc;
use serde::Deserialize;
use serde_json::Value;

/// Slow requests of the disk whose details are shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Slow {
    /// The server has not replied yet.
    #[default]
    Unknown,
    /// The server does not report slow requests.
    None,
    /// A line for each request.
    Some(Vec<String>),
}

#[derive(Deserialize)]
struct Told {
    requests: Vec<SlowRequest>,
}

impl Slow {
    pub fn of(told: Option<&Value>) -> Slow {
        match told.map(Told::deserialize) {
            Some(Ok(told)) => Slow::Some(told.requests.iter().map(line).collect()),
            _ => Slow::None,
        }
    }
}

fn line(request: &SlowRequest) -> String {
    let SlowRequest {
        op, len, offset, ..
    } = request;
    let at = Utc::from_seconds(request.time_ms / 1000).to_string();
    let at = at.rsplit(' ').next().unwrap_or_default();
    let us = |ns: u64| time(ns as f64 / 1e3);
    let in_stage = request.stages.get(&request.longest).copied().unwrap_or(0);
    let error = match request.error {
        0 => String::new(),
        errno => format!(", error {errno}"),
    };
    format!(
        "{at} {}: {} in {}; {op} {len} at {offset}{error}",
        us(request.total_ns),
        us(in_stage),
        request.longest
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_request_is_a_line() {
        assert_eq!(Slow::of(None), Slow::None);
        assert_eq!(Slow::of(Some(&json!({ "requests": 3 }))), Slow::None);
        let told = json!({ "requests": [{
            "id": "a", "time_ms": 45_296_000, "op": "read", "offset": 8192, "len": 4096, "queue": 0,
            "error": 5, "polled": false, "total_ns": 30_200_000, "longest": "queue",
            "stages": { "queue": 30_000_000 }
        }] });
        let line = "12:34:56 30ms: 30ms in queue; read 4096 at 8192, error 5".to_owned();
        assert_eq!(Slow::of(Some(&told)), Slow::Some(vec![line]));
    }
}
