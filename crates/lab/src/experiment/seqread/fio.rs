//! fio's figures.

use fathom_run::evidence::Load;
use fathom_run::{Better, Measure, Unit};
use serde_json::Value;

/// A percentile is told if so many samples lie beyond it.
const BEYOND: f64 = 10.0;
const SHOWN: [f64; 4] = [50.0, 90.0, 99.0, 99.9];

/// The reads of the only job in fio's JSON, which has one thread and one request in flight.
pub(super) struct Reads {
    pub measures: Vec<Measure>,
    pub load: Load,
}

impl Reads {
    /// Of fio's JSON, before which it may print warnings; None: it is none.
    pub fn parse(text: &str) -> Option<Reads> {
        let report: Value = serde_json::from_str(text.get(text.find('{')?..)?).ok()?;
        let job = &report["jobs"][0];
        let read = &job["read"];
        let seconds = read["runtime"].as_f64()? / 1000.0;
        let percent = |name: &str| job[name].as_f64().unwrap_or(0.0);
        let cpu = (percent("usr_cpu") + percent("sys_cpu")) / 100.0 * seconds;
        let load = Load {
            threads: 1,
            depth: 1,
            requests: read["total_ios"].as_u64()?,
            bytes: read["io_bytes"].as_u64()?,
            seconds,
            // fio's latency begins after its own work for a request.
            mean_ns: read["clat_ns"]["mean"].as_f64()?,
            thread_cpu: vec![cpu],
            polls: false,
        };
        Some(Reads {
            measures: measures(read)?,
            load,
        })
    }
}

fn measures(read: &Value) -> Option<Vec<Measure>> {
    let latency = &read["clat_ns"];
    let count = read["total_ios"].as_u64()?;
    let rate = |name: &str, unit, value| Measure::new(name, unit, value, Better::Higher).of(count);
    let time =
        |name: String, value| Measure::new(name, Unit::Nanoseconds, value, Better::Lower).of(count);
    let bytes = read["io_bytes"].as_u64()? as f64;
    let seconds = read["runtime"].as_f64()? / 1000.0;
    let mut measures = vec![
        rate("iops", Unit::PerSecond, read["iops"].as_f64()?),
        rate(
            "throughput",
            Unit::MegabytesPerSecond,
            bytes / seconds.max(1e-3) / 1e6,
        ),
        time("latency.mean".into(), latency["mean"].as_f64()?),
    ];
    let mut percentiles: Vec<(f64, f64)> = latency["percentile"]
        .as_object()?
        .iter()
        .filter_map(|(percent, ns)| Some((percent.parse().ok()?, ns.as_f64()?)))
        .filter(|(percent, _)| SHOWN.contains(percent))
        .filter(|(percent, _)| count as f64 * (100.0 - percent) / 100.0 >= BEYOND)
        .collect();
    percentiles.sort_by(|a, b| a.0.total_cmp(&b.0));
    let named = percentiles
        .into_iter()
        .map(|(percent, ns)| time(format!("latency.p{percent}"), ns));
    measures.extend(named);
    measures.push(time("latency.max".into(), latency["max"].as_f64()?));
    Some(measures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_report_of_version_3() {
        let text = "fio: a warning\n{\"jobs\": [{\"usr_cpu\": 5.0, \"sys_cpu\": 20.0, \"read\": {\"iops\": 3571.5, \"total_ios\": 5715,
            \"io_bytes\": 23408640, \"runtime\": 1600,
            \"clat_ns\": {\"mean\": 278000.0, \"max\": 9000000, \"percentile\":
            {\"1.000000\": 1, \"50.000000\": 270000, \"99.000000\": 400000, \"99.900000\": 5}}}}]}";
        let Reads { measures, load, .. } = Reads::parse(text).unwrap();
        assert_eq!((load.requests, load.bytes), (5715, 23_408_640));
        // A quarter of 1.6 s.
        assert!((load.thread_cpu[0] - 0.4).abs() < 1e-9, "{load:?}");
        let said: Vec<_> = measures
            .iter()
            .map(|m| (m.name.as_str(), m.value))
            .collect();
        let wanted = [
            ("iops", 3571.5),
            ("throughput", 14.6304),
            ("latency.mean", 278_000.0),
            ("latency.p50", 270_000.0),
            // Only five are beyond p99.9.
            ("latency.p99", 400_000.0),
            ("latency.max", 9_000_000.0),
        ];
        assert_eq!(said, wanted);
        assert!(measures.iter().all(|measure| measure.samples == 5715));
        assert!(Reads::parse("fio: failed").is_none());
    }
}
