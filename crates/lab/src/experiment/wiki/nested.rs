//! The same run in a KVM host that is emulated, for machines without hardware virtualisation.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::options::Options;
use crate::error::{Error, Result, Tail};
use crate::kvm_host::KvmHost;

/// In the KVM host, on its scratch disk.
const OUTPUT: &str = "/var/tmp/run";
const LIMIT: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_secs(120);
/// Lines of the inner run that an error shows, the end of a console among them.
const SHOWN: usize = 110;

/// Runs a cell in a running KVM host; its breakdown is copied to `options.output`, also
/// when only a part of it was made.
///
/// # Errors
/// The inner run's failure, with the end of what it said, or that of the KVM host.
pub fn run_in(host: &mut KvmHost, options: &Options, progress: &mut dyn FnMut(&str)) -> Result<()> {
    let settings = json!(options.to_settings().0).to_string();
    let quoted = format!("'{}'", settings.replace('\'', r"'\''"));
    let script = format!("rm -rf {OUTPUT}; exec fathom lab cell wiki --settings={quoted} {OUTPUT}");
    let mut said: Vec<String> = Vec::new();
    let status = host.run(&script, LIMIT, &mut |line| {
        if let Some(step) = line.strip_prefix("lab: ") {
            progress(step);
        } else if said.len() < 10 * SHOWN {
            said.push(line.to_owned());
        }
    })?;
    let fetched = fetch(host, &options.output);
    match status {
        0 => fetched,
        status => Err(inner_error(status, &said)),
    }
}

/// The inner run ends with one line that says what went wrong, after consoles and the like.
fn inner_error(status: i32, said: &[String]) -> Error {
    let from = said.len().saturating_sub(SHOWN);
    let last = said.iter().rposition(|line| line.starts_with("fathom: "));
    let Some(last) = last else {
        return Error::Program {
            program: "the run in the KVM host".into(),
            status: format!("status {status}"),
            tail: Tail(said[from..].join("\n")),
        };
    };
    let what = said[last].trim_start_matches("fathom: ").to_owned();
    let tail = Tail(said[from.min(last)..last].join("\n"));
    Error::Inner { what, tail }
}

fn fetch(host: &mut KvmHost, output: &Path) -> Result<()> {
    host.check(&format!("test -s {OUTPUT}/run.json"), SHORT)?;
    host.fetch(OUTPUT, output, LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_runs_last_words_are_the_error() {
        let said = |lines: &[&str]| {
            lines
                .iter()
                .map(|&line| line.to_owned())
                .collect::<Vec<_>>()
        };
        let lines = said(&["    | booting", "    | stuck", "fathom: no guest", "more"]);
        let text = inner_error(1, &lines).to_string();
        let wanted = "in the KVM host: no guest\n    |     | booting\n    |     | stuck";
        assert_eq!(text, wanted);
        let text = inner_error(137, &said(&["Killed"])).to_string();
        assert!(
            text.contains("status 137") && text.contains("Killed"),
            "{text}"
        );
    }
}
