//! The same run in a KVM host that is emulated, for machines without hardware virtualisation.

use std::path::Path;
use std::time::Duration;

use super::options::Options;
use crate::error::{Error, Result, Tail};
use crate::kvm_host::KvmHost;

/// In the KVM host, on its scratch disk.
const OUTPUT: &str = "/var/tmp/run";
const FATHOM: &str = "/opt/fathom";
const LIMIT: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_secs(120);
/// Lines of the inner run that an error shows.
const SHOWN: usize = 40;

/// Runs the scenario in a running KVM host; the run directory is copied to `options.output`, also
/// when only a part of it was made.
///
/// # Errors
/// The inner run's failure, with the end of what it said, or that of the KVM host.
pub fn run_in(host: &mut KvmHost, options: &Options, progress: &mut dyn FnMut(&str)) -> Result<()> {
    let inner = Options {
        fathom: FATHOM.into(),
        output: OUTPUT.into(),
        is_nested: true,
        ..options.clone()
    };
    // Numbers, words of ours and paths of ours: nothing needs quoting.
    let args = inner.to_args().join(" ");
    let script = format!("rm -rf {OUTPUT}; cd /var/tmp && exec fathom lab run wiki {args}");
    let mut said: Vec<String> = Vec::new();
    let status = host.run(&script, LIMIT, &mut |line| {
        if let Some(step) = line.strip_prefix("lab: ") {
            progress(step);
        } else if said.len() < 10 * SHOWN {
            said.push(line.to_owned());
        }
    })?;
    let fetched = fetch(host, &options.output);
    if status != 0 {
        let from = said.len().saturating_sub(SHOWN);
        return Err(Error::Program {
            program: "the run in the KVM host".into(),
            status: format!("status {status}"),
            tail: Tail(said[from..].join("\n")),
        });
    }
    fetched
}

fn fetch(host: &mut KvmHost, output: &Path) -> Result<()> {
    host.check(&format!("test -s {OUTPUT}/run.json"), SHORT)?;
    host.fetch(OUTPUT, output, LIMIT)
}
