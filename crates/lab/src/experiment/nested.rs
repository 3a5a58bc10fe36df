//! Cells in an emulated KVM host: for machines without hardware virtualisation, and for
//! experiments whose changes to a machine are not acceptable on this one.
//!
//! In the KVM host, `fathom lab cell` runs the cell as this machine would, and leaves the yield in
//! the cell's folder, which is copied out.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use super::{Context, Experiment, Need, Session, Settings, Yield};
use crate::bed::KvmHost;
use crate::environment;
use crate::error::{Context as _, Error, Result, Tail};
use crate::guest::NO_TIMER;
use crate::{host, shell};

/// The cell's folder in the KVM host, on its scratch disk.
const FOLDER: &str = "/var/tmp/cell";
/// File with the yield in a cell's folder; removed when it has been read.
const YIELD: &str = "yield.json";
const LIMIT: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_secs(120);
/// Parts of errors that mean that a guest hangs.
///
/// An emulated processor may lose its timer. The guest's kernel then waits forever, and reports a
/// timer issue on its console if it can.
const STANDS_STILL: [&str; 2] = [NO_TIMER, "nothing after"];
/// Lines of the inner run that an error shows, including the end of a console.
const SHOWN: usize = 110;

/// Runs the cells of an experiment, all in one KVM host.
pub(super) struct Nested {
    experiment: &'static dyn Experiment,
    fathom: PathBuf,
    needs: Vec<Need>,
    /// The KVM host, from the first cell on.
    host: Option<KvmHost>,
}

impl Nested {
    /// `needs` are the requirements of all cells.
    pub fn new(experiment: &'static dyn Experiment, context: &Context, needs: Vec<Need>) -> Nested {
        Nested {
            experiment,
            fathom: context.fathom.clone(),
            needs,
            host: None,
        }
    }

    fn boot(&self) -> Result<KvmHost> {
        let (mut programs, mut modules) = (Vec::new(), Vec::new());
        for need in &self.needs {
            match need {
                Need::Program(name) if !KvmHost::has(name) => programs.push(host::program(name)?),
                Need::Module(name) => modules.push(*name),
                Need::LoopDevices => modules.push("loop"),
                _ => {}
            }
        }
        let programs: Vec<&Path> = programs.iter().map(PathBuf::as_path).collect();
        KvmHost::boot_with(&self.fathom, &programs, &modules)
    }
}

impl Session for Nested {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        match self.once(settings, folder, progress) {
            Err(error) if stands_still(&error) => {
                progress("a guest stood still, which emulation may be to blame for: once more");
                self.host = None;
                fs::remove_dir_all(folder)
                    .and_then(|()| fs::create_dir(folder))
                    .context(|| format!("cannot empty {}", folder.display()))?;
                self.once(settings, folder, progress)
            }
            yielded => yielded,
        }
    }
}

impl Nested {
    fn once(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let host = match &mut self.host {
            Some(host) => host,
            None => {
                progress(
                    "booting a KVM host in an emulated machine: its times are stretched and tell \
                     nothing about speed",
                );
                let host = self.boot()?;
                self.host.insert(host)
            }
        };
        run_in(host, self.experiment.name(), settings, folder, progress)
    }
}

/// Whether a cell failed because a guest in the KVM host hung. Another KVM host may work.
pub fn stands_still(error: &Error) -> bool {
    let text = error.to_string();
    STANDS_STILL.iter().any(|words| text.contains(words))
}

/// Runs a cell in a running KVM host. The cell's files are copied to `folder`, also if the cell
/// failed and left only some of them.
///
/// # Errors
/// The inner run's failure with the end of its output, or the KVM host's failure.
pub fn run_in(
    host: &mut KvmHost,
    experiment: &str,
    settings: &Settings,
    folder: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<Yield> {
    run_within(host, experiment, settings, folder, LIMIT, progress)
}

/// Runs a cell like [`run_in`], with `limit` as the time limit.
///
/// # Errors
/// Like [`run_in`], and if the time limit is exceeded.
pub fn run_within(
    host: &mut KvmHost,
    experiment: &str,
    settings: &Settings,
    folder: &Path,
    limit: Duration,
    progress: &mut dyn FnMut(&str),
) -> Result<Yield> {
    let quoted = shell::quoted(&json!(settings.0).to_string());
    let script =
        format!("rm -rf {FOLDER}; exec fathom lab cell {experiment} --settings={quoted} {FOLDER}");
    let mut said: Vec<String> = Vec::new();
    let status = host.run(&script, limit, &mut |line| {
        if let Some(step) = line.strip_prefix("lab: ") {
            progress(step);
        } else {
            // The last lines show how the run ended.
            if said.len() == 10 * SHOWN {
                said.drain(..5 * SHOWN);
            }
            said.push(line.to_owned());
        }
    })?;
    let is_there = host.output(&format!("test -d {FOLDER}"), SHORT)?.status == 0;
    let fetched = match is_there {
        true => host.fetch(FOLDER, folder, LIMIT),
        false => Ok(()),
    };
    match status {
        0 => fetched.and_then(|()| take(folder)),
        status => Err(inner_error(status, &said)),
    }
}

/// Runs a cell on this machine, which is the KVM host, and leaves all results in `folder`.
///
/// # Errors
/// Those of the cell.
pub fn run_here(
    experiment: &dyn Experiment,
    settings: &Settings,
    context: &Context,
    folder: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<()> {
    fs::create_dir_all(folder).context(|| format!("cannot create {}", folder.display()))?;
    let mut yielded = experiment.begin(context).cell(settings, folder, progress)?;
    yielded
        .environment
        .get_or_insert_with(environment::with_guests);
    let path = folder.join(YIELD);
    fs::write(&path, json!(yielded).to_string())
        .context(|| format!("cannot write {}", path.display()))
}

/// Reads a cell's yield from its folder, and removes the file.
fn take(folder: &Path) -> Result<Yield> {
    let path = folder.join(YIELD);
    let what = || format!("cannot read {}", path.display());
    let text = fs::read(&path).context(what)?;
    fs::remove_file(&path).context(what)?;
    serde_json::from_slice(&text).map_err(|error| Error::Unusable {
        path,
        reason: error.to_string(),
    })
}

/// Returns the inner run's error: its last line with `fathom: `, after consoles and the like.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_stands_still_is_told_from_other_failures() {
        let inner = |what: &str, tail: &str| Error::Inner {
            what: what.into(),
            tail: Tail(tail.into()),
        };
        let timeout = Error::Timeout {
            what: "in the guest".into(),
            after: Duration::from_secs(120),
            tail: Tail(String::new()),
        };
        let timeout = inner(&timeout.to_string(), "");
        let lost = inner("status 124", "rcu: Possible timer handling issue on cpu=0");
        assert!(stands_still(&timeout) && stands_still(&lost));
        assert!(!stands_still(&inner("no such image", "booting")));
    }

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
