//! Merging of equal pages by the kernel (KSM), for a limited time.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::restore_settings::ChangedSetting;

const FOLDER: &str = "/sys/kernel/mm/ksm";
/// Minimum number of passes over all memory. The first may have begun anywhere, and the kernel
/// examines a page twice before it merges it.
const LEAST: u64 = 3;
/// Fraction of the merged pages. A pass that merges fewer new pages is the last one.
const LITTLE: f64 = 0.01;
/// Settings: pages per batch, milliseconds between batches, and no skipping of pages that were
/// examined without success. The last one exists since Linux 6.7.
const FAST: [(&str, &str); 3] = [
    ("pages_to_scan", "20000"),
    ("sleep_millisecs", "1"),
    ("smart_scan", "0"),
];
const PATIENCE: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(20);

/// Merges the pages of all processes that allow it. Merged pages stay merged; settings are
/// restored.
///
/// # Errors
/// One line that says why pages cannot be merged here, or that they are merged already.
pub fn merge() -> Result<()> {
    merge_in(Path::new(FOLDER), PATIENCE)
}

fn merge_in(folder: &Path, patience: Duration) -> Result<()> {
    let refuse = |why: &str| Error::Protocol(format!("pages were not merged: {why}"));
    if !folder.exists() {
        return Err(refuse("this kernel has no KSM"));
    }
    if read(folder, "run")? == "1" {
        let why = "the machine does so by itself all the time, and the memory is that of merged \
                   pages";
        return Err(refuse(why));
    }
    let change = |(name, value): (&str, &str)| -> Result<ChangedSetting> {
        ChangedSetting::new(&folder.join(name), value, &read(folder, name)?)
    };
    let fast = FAST.into_iter();
    let fast = fast.filter(|(name, _)| folder.join(name).exists());
    let _fast = fast.map(change).collect::<Result<Vec<_>>>()?;
    let count = |name: &str| -> Result<u64> {
        let text = read(folder, name)?;
        text.parse()
            .map_err(|_| refuse(&format!("{name} is '{text}'")))
    };
    let first = count("full_scans")?;
    let (mut pass, mut merged) = (first, 0);
    let _running = change(("run", "1"))?;
    let begin = Instant::now();
    while begin.elapsed() < patience {
        let now = count("full_scans")?;
        if now != pass {
            let before = std::mem::replace(&mut merged, count("pages_sharing")?);
            let more = merged.saturating_sub(before) as f64;
            if now >= first + LEAST && more <= LITTLE * merged as f64 {
                return Ok(());
            }
            pass = now;
        }
        std::thread::sleep(POLL);
    }
    let seconds = patience.as_secs();
    Err(refuse(&format!("not complete after {seconds} s")))
}

fn read(folder: &Path, name: &str) -> Result<String> {
    let path = folder.join(name);
    let text = fs::read_to_string(&path).context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates stand-ins for the kernel's files, in which the number of passes never increases.
    fn files(run: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("run", run);
        write("pages_to_scan", "100\n");
        write("sleep_millisecs", "20\n");
        write("full_scans", "7\n");
        dir
    }

    #[test]
    fn settings_are_as_before_whatever_came_of_it() {
        let dir = files("0\n");
        let error = merge_in(dir.path(), Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("not complete"), "{error}");
        for (name, before) in [("run", "0"), ("pages_to_scan", "100")] {
            assert_eq!(read(dir.path(), name).unwrap(), before, "{name}");
        }
    }

    #[test]
    fn where_there_is_nothing_to_compare_it_is_said() {
        let dir = files("1\n");
        let error = |path: &Path| merge_in(path, Duration::ZERO).unwrap_err().to_string();
        assert!(error(dir.path()).contains("by itself"));
        assert!(error(&dir.path().join("none")).contains("has no KSM"));
    }
}
