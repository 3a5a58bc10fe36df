//! Executes one call for each of many small files, one after the other. This measures the cost of
//! names and attributes, without data. The files must be in a directory that contains nothing else.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use fathom_trace::Clock;
use fathom_trace::histogram::{Counts, FINE};

use super::report::{Operation, Report};
use crate::cpu;
use crate::error::{Error, Result};
use crate::report::Latency;

/// Contents of each created file.
const CONTENTS: [u8; 4096] = [7; 4096];

/// The call to execute for each file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Creates a file, writes 4 KiB, and closes it, without a flush.
    Create,
    /// Reads the file's attributes (lstat).
    Stat,
    /// Renames the file within its directory. Other calls do not find renamed files.
    Rename,
    /// Deletes the file.
    Delete,
}

impl Call {
    /// All calls.
    pub const ALL: [Call; 4] = [Call::Create, Call::Stat, Call::Rename, Call::Delete];

    /// Returns the name of the call in options and results.
    pub fn name(self) -> &'static str {
        match self {
            Call::Create => "create",
            Call::Stat => "stat",
            Call::Rename => "rename",
            Call::Delete => "delete",
        }
    }

    fn perform(self, file: &Path) -> io::Result<()> {
        match self {
            Call::Create => {
                let mut options = OpenOptions::new();
                let mut new = options.write(true).create_new(true).open(file)?;
                new.write_all(&CONTENTS)
            }
            Call::Stat => fs::symlink_metadata(file).map(drop),
            Call::Rename => fs::rename(file, file.with_extension("renamed")),
            Call::Delete => fs::remove_file(file),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Call {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Call, String> {
        let found = Call::ALL.into_iter().find(|call| call.name() == text);
        found.ok_or_else(|| format!("'{text}' is none of create, stat, rename, delete"))
    }
}

/// Executes `call` for the files 0 to `count` - 1 of the directory `dir`. The report counts calls,
/// and no bytes.
///
/// # Errors
/// If a call fails. The error contains the file's name.
pub fn call_each(dir: &Path, call: Call, count: u64) -> Result<Report> {
    let mut ticks = Counts::<FINE>::default();
    let clock = Clock::get();
    let (begin, cpu_ns) = (Instant::now(), cpu::thread_ns());
    for number in 0..count {
        let file = dir.join(format!("f{number}"));
        let start = clock.now();
        let done = call.perform(&file);
        ticks.record(clock.now().saturating_sub(start));
        done.map_err(|cause| failed(call, &file, &cause))?;
    }
    let runtime = begin.elapsed().as_secs_f64();
    let cpu_ns = cpu::thread_ns() - cpu_ns;
    let rate = count as f64 / runtime.max(1e-9);
    let operation = Operation {
        op: call.name().into(),
        ops: count,
        ios: count,
        bytes: 0,
        ops_per_s: rate,
        iops: rate,
        mb_per_s: 0.0,
        latency: Latency::of(&ticks, 1e9 / clock.hz()),
        histogram: Vec::new(),
    };
    Ok(Report {
        directory: PathBuf::from(dir),
        workload: "names".into(),
        bs: 0,
        threads: 1,
        direct: false,
        files: count,
        dirs: 1,
        prepare: None,
        runtime,
        sync: None,
        iops: rate,
        mb_per_s: 0.0,
        operations: vec![operation],
        client_cpu_us_per_request: cpu_ns as f64 / count.max(1) as f64 / 1e3,
        verify: None,
        kept: None,
    })
}

fn failed(call: Call, file: &Path, cause: &io::Error) -> Error {
    Error::Options(format!(
        "cannot {call} {}: {}",
        file.display(),
        fathom_units::cause(cause)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_is_called_once() {
        let dir = tempfile::tempdir().unwrap();
        let names = || {
            let entries = fs::read_dir(dir.path()).unwrap();
            let mut names: Vec<String> = entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let report = call_each(dir.path(), Call::Create, 3).unwrap();
        assert_eq!(names(), ["f0", "f1", "f2"]);
        assert_eq!(fs::read(dir.path().join("f1")).unwrap(), CONTENTS);
        let operation = report.operation("create").unwrap();
        assert_eq!((operation.ops, operation.bytes), (3, 0));
        // The calls took only a part of the total time.
        let spent = operation.latency.mean_ns * 3.0;
        assert!(spent > 0.0 && spent <= report.runtime * 1.1e9, "{report:?}");
        let error = call_each(dir.path(), Call::Stat, 4)
            .unwrap_err()
            .to_string();
        assert!(error.contains("stat") && error.contains("f3"), "{error}");
        call_each(dir.path(), Call::Rename, 2).unwrap();
        assert_eq!(names(), ["f0.renamed", "f1.renamed", "f2"]);
        fs::remove_file(dir.path().join("f0.renamed")).unwrap();
        fs::remove_file(dir.path().join("f1.renamed")).unwrap();
        call_each(dir.path(), Call::Create, 2).unwrap();
        call_each(dir.path(), Call::Delete, 3).unwrap();
        assert_eq!(names(), [""; 0]);
    }

    #[test]
    fn calls_are_read_as_they_are_written() {
        for call in Call::ALL {
            assert_eq!(call.to_string().parse(), Ok(call));
        }
        assert!("move".parse::<Call>().is_err());
    }
}
