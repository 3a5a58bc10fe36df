//! bonnie++'s line of results (bon_csv2html(1)). `+++++` means too fast to be measured, and an
//! empty field means not requested. Neither is a value, and neither is zero.

use fathom_run::{Better, Measure, Unit};

use crate::error::{Error, Result};

/// Maximum number of characters of a field in an error.
const MOST_TEXT: usize = 40;
/// Bytes per kilobyte in bonnie++'s results.
const KIB: f64 = 1024.0;

/// A phase of bonnie++, in the order of its results.
struct Phase {
    name: &'static str,
    /// Whether the result is in KiB per second; otherwise it is in operations per second.
    bytes: bool,
}

const fn bytes(name: &'static str) -> Phase {
    Phase { name, bytes: true }
}

const fn operations(name: &'static str) -> Phase {
    Phase { name, bytes: false }
}

const DATA: [Phase; 6] = [
    bytes("putc"),
    bytes("put-block"),
    bytes("rewrite"),
    bytes("getc"),
    bytes("get-block"),
    operations("seeks"),
];
const FILES: [Phase; 6] = [
    operations("seq-create"),
    operations("seq-read"),
    operations("seq-delete"),
    operations("ran-create"),
    operations("ran-read"),
    operations("ran-delete"),
];
/// Number of fields between the results of the data and of the files: the number, sizes,
/// directories and chunks of the files.
const BETWEEN: usize = 5;

/// Returns the index of the first result of the data, by the format's version.
fn first(version: &str) -> Option<usize> {
    match version {
        "1.96" | "1.97" => Some(7),
        // This version also has the number of seeks and seekers. bonnie++ 2.00 prints 1.98.
        "1.98" | "2.00" => Some(9),
        _ => None,
    }
}

/// The main measure of a disk: sequential writes of blocks.
pub const WRITTEN: &str = "put-block.throughput";

/// Returns the measures of each phase: `NAME.throughput` or `NAME.rate`, `NAME.cpu`,
/// `NAME.latency` (the longest operation).
///
/// # Errors
/// If no line has a known version, or if a result is not a number.
pub fn measures(text: &str) -> Result<Vec<Measure>> {
    let line = { text.lines() }
        .map(str::trim)
        .find(|line| line.split(',').count() > DATA.len() && line.starts_with(['1', '2']))
        .ok_or_else(|| Error::Protocol("bonnie++ printed no figures".into()))?;
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let data = first(fields[0]).ok_or_else(|| {
        let version = clipped(fields[0]);
        Error::Protocol(format!(
            "bonnie++'s figures are of version '{version}', and not of 1.96 to 1.98"
        ))
    })?;
    let files = data + 2 * DATA.len() + BETWEEN;
    let latencies = files + 2 * FILES.len();
    let expected = latencies + DATA.len() + FILES.len();
    if fields.len() != expected {
        let count = fields.len();
        return Err(Error::Protocol(format!(
            "bonnie++'s line has {count} fields, and not {expected}"
        )));
    }
    let places = |first: usize| (first..).step_by(2);
    let phases = DATA.iter().zip(places(data));
    let phases = phases.chain(FILES.iter().zip(places(files)));
    let mut measures = Vec::new();
    for ((phase, at), latency) in phases.zip(latencies..) {
        let found = [
            rate(phase, fields[at])?,
            cpu(phase, fields[at + 1])?,
            longest(phase, fields[latency])?,
        ];
        measures.extend(found.into_iter().flatten());
    }
    // The first is a run's main measure, and blocks say more about a disk than single bytes.
    measures.sort_by_key(|one| one.name.starts_with("putc.") || one.name.starts_with("getc."));
    Ok(measures)
}

fn rate(phase: &Phase, text: &str) -> Result<Option<Measure>> {
    let (what, unit, by) = match phase.bytes {
        true => ("throughput", Unit::MegabytesPerSecond, KIB / 1e6),
        false => ("rate", Unit::PerSecond, 1.0),
    };
    let name = format!("{}.{what}", phase.name);
    // Zero is not a speed: the phase was not measured.
    let value = number(&name, text)?.filter(|value| *value > 0.0);
    Ok(value.map(|value| Measure::new(name, unit, value * by, Better::Higher)))
}

fn cpu(phase: &Phase, text: &str) -> Result<Option<Measure>> {
    let name = format!("{}.cpu", phase.name);
    let value = number(&name, text)?;
    Ok(value.map(|value| Measure::new(name, Unit::Percent, value, Better::Lower)))
}

fn longest(phase: &Phase, text: &str) -> Result<Option<Measure>> {
    const UNITS: [(&str, f64); 4] = [("us", 1e3), ("ms", 1e6), ("ns", 1.0), ("s", 1e9)];
    let name = format!("{}.latency", phase.name);
    let split = UNITS
        .iter()
        .find_map(|(unit, ns)| Some((text.strip_suffix(unit)?, *ns)));
    let (digits, ns) = match split {
        Some(split) => split,
        None if is_none(text) => return Ok(None),
        None => return Err(no_figure(&name, text)),
    };
    let value = number(&name, digits)?;
    Ok(value.map(|value| Measure::new(name, Unit::Nanoseconds, value * ns, Better::Lower)))
}

/// Parses a number; `None` if there is no result.
fn number(name: &str, text: &str) -> Result<Option<f64>> {
    if is_none(text) {
        return Ok(None);
    }
    let is_plain = text
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    let value = text
        .parse()
        .ok()
        .filter(|value: &f64| is_plain && value.is_finite());
    value.map(Some).ok_or_else(|| no_figure(name, text))
}

/// Whether a result was not requested, or the phase was too fast.
fn is_none(text: &str) -> bool {
    text.bytes().all(|byte| byte == b'+')
}

fn no_figure(name: &str, text: &str) -> Error {
    let text = clipped(text);
    Error::Protocol(format!(
        "bonnie++ says '{text}' for {name}, which is no figure"
    ))
}

fn clipped(text: &str) -> String {
    text.chars().take(MOST_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OLD: &str = "1.97,1.97,fraw,1,1361088000,2G,,875,84,74157,13,21666,6,3128,78,50335,6,\
        263.5,15,16,,,,,21634,57,+++++,+++,+++++,+++,22124,60,+++++,+++,+++++,+++,31893us,632ms,\
        6507ms,83291us,299ms,728ms,241us,593us,443us,108us,30us,138us";

    /// Output of bonnie++ 2.00a for a disk, with and without single bytes.
    const NEW: &str = "1.98,2.00a,guest,1,1795413283,512M,,8192,5,1389,99,754829,60,+++++,+++,2340,\
        99,+++++,+++,+++++,+++,16,,,,,9177,94,+++++,+++,+++++,+++,5510,95,+++++,+++,+++++,+++,\
        7163us,201us,104us,4026us,118us,4160us,373us,463us,2172us,4378us,4076us,5112us";
    const BLOCKS: &str = "1.98,2.00a,guest,2,1795402743,64M,,8192,5,,,86316,30,+++++,+++,,,+++++,\
        +++,+++++,+++,,,,,,,,,,,,,,,,,,,21175us,6677us,,65us,8084us,,,,,,";

    fn value(measures: &[Measure], name: &str) -> Option<f64> {
        let mut all = measures.iter();
        all.find(|one| one.name == name).map(|one| one.value)
    }

    /// The results in the blog post about QEMU's first data plane, in the format of bonnie++ 1.97.
    #[test]
    fn a_line_of_version_1_97() {
        let found = measures(&format!("a warning\n{OLD}\n")).unwrap();
        for (name, wanted) in [
            ("putc.throughput", Some(0.896)),
            ("put-block.throughput", Some(75.936_768)),
            ("put-block.cpu", Some(13.0)),
            ("put-block.latency", Some(632e6)),
            ("seeks.rate", Some(263.5)),
            ("seeks.latency", Some(728e6)),
            ("seq-create.rate", Some(21634.0)),
            ("seq-read.rate", None),
            ("seq-read.cpu", None),
            ("seq-read.latency", Some(593e3)),
            ("ran-create.cpu", Some(60.0)),
            ("ran-delete.latency", Some(138e3)),
        ] {
            let close = match (value(&found, name), wanted) {
                (Some(value), Some(wanted)) => (value / wanted - 1.0).abs() < 1e-9,
                (value, wanted) => value == wanted,
            };
            assert!(close, "{name}: {:?}", value(&found, name));
        }
        assert!(found.iter().all(|one| one.value > 0.0), "{found:?}");
        assert_eq!(found[0].name, "put-block.throughput");
    }

    #[test]
    fn lines_of_version_1_98() {
        let found = measures(NEW).unwrap();
        let read = value(&found, "getc.throughput").unwrap();
        assert!((read - 2.396_16).abs() < 1e-9, "{read}");
        assert_eq!(value(&found, "put-block.cpu"), Some(60.0));
        assert_eq!(value(&found, "ran-create.rate"), Some(5510.0));
        assert_eq!(value(&found, "ran-delete.latency"), Some(5112e3));
        assert_eq!(value(&found, "seeks.rate"), None);
        // Five phases were slow enough to be measured; all have a longest operation.
        assert_eq!(found.len(), 5 * 2 + 12);
        let found = measures(BLOCKS).unwrap();
        let written = value(&found, "put-block.throughput").unwrap();
        assert!((written - 88.387_584).abs() < 1e-9, "{written}");
        assert_eq!(value(&found, "rewrite.latency"), Some(6677e3));
        assert_eq!(value(&found, "putc.latency"), None);
        assert_eq!(found.len(), 2 + 4);
    }

    #[test]
    fn what_is_no_line_of_figures_is_told() {
        let said = |text: &str| measures(text).unwrap_err().to_string();
        assert!(said("").contains("no figures"));
        assert!(said("Writing intelligently...done").contains("no figures"));
        assert!(said(&OLD.replace("1.97,1.97", "1.03,1.03")).contains("version '1.03'"));
        assert!(said(&OLD.replace("1.97,1.97", "1.98,2.00a")).contains("48 fields, and not 50"));
        assert!(said(&OLD.replace("74157", "-1")).contains("'-1' for put-block.throughput"));
        assert!(said(&OLD.replace("632ms", "632")).contains("put-block.latency"));
        assert!(said(&OLD.replace(",13,", ",inf,")).contains("put-block.cpu"));
        let long = said(&OLD.replace("74157", &"x".repeat(9999)));
        assert!(long.len() < 200, "{long}");
    }

    fn figure() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("+++++".to_owned()),
            Just(String::new()),
            (0u32..2_000_000).prop_map(|n| n.to_string()),
            (0.0f64..1e6).prop_map(|x| format!("{x:.1}")),
        ]
    }

    fn latency() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("+++++".to_owned()),
            Just(String::new()),
            (
                0u32..100_000,
                prop_oneof![Just("us"), Just("ms"), Just("s")]
            )
                .prop_map(|(n, unit)| format!("{n}{unit}")),
        ]
    }

    proptest! {
        /// Every field with a result becomes one measure, and no other field does.
        #[test]
        fn a_line_has_as_many_measures_as_figures(
            is_new in any::<bool>(),
            figures in prop::collection::vec(figure(), 24),
            latencies in prop::collection::vec(latency(), 12),
        ) {
            let head = match is_new {
                true => "1.98,2.00a,n,1,7,2G,,8192,5",
                false => "1.97,1.97,n,1,7,2G,",
            };
            let (data, files) = figures.split_at(12);
            let line = [
                head.to_owned(), data.join(","), "16,,,,".into(), files.join(","),
                latencies.join(","),
            ];
            let found = measures(&line.join(",")).unwrap();
            let number = |text: &String| text.parse::<f64>().ok();
            let rates = figures.iter().step_by(2).filter_map(number).filter(|&value| value > 0.0);
            let shares = figures.iter().skip(1).step_by(2).filter_map(number);
            let times = latencies.iter().filter(|text| text.ends_with('s'));
            prop_assert_eq!(found.len(), rates.count() + shares.count() + times.count());
            let mut names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            prop_assert_eq!(names.len(), found.len());
            prop_assert!(found.iter().all(|one| one.value.is_finite() && one.value >= 0.0));
        }

        #[test]
        fn garbage_is_refused_or_read_and_never_panics(
            text in "\\PC*",
            fields in prop::collection::vec("[0-9.+,a-z-]{0,9}", 0..60),
        ) {
            let _ = measures(&text);
            let _ = measures(&format!("1.98,{}", fields.join(",")));
            let _ = measures(&format!("{OLD}{text}"));
        }
    }
}
