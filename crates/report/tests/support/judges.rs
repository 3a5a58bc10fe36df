//! Checks of a report: comparison with a reviewed file, maximum width, and an independent oracle.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn golden(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    tests.join("data").join(name)
}

/// Compares text with a reviewed file. If FATHOM_BLESS is set, overwrites the file: review the
/// diff.
pub fn assert_golden(name: &str, text: &str) {
    let path = golden(name);
    if std::env::var_os("FATHOM_BLESS").is_some() {
        fs::write(&path, text).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    for (number, (is, wanted)) in text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(is, wanted, "{name}:{}", number + 1);
    }
    assert_eq!(text.len(), expected.len(), "{name} is longer or shorter");
}

pub fn assert_fits(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
}

/// Returns the number of figures that the oracle found to be right.
pub fn oracle(report: &str) -> u32 {
    let script = golden("").join("../report/cells/oracle.py");
    let mut child = Command::new("python3")
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    child
        .stdin
        .take()
        .unwrap()
        .write_all(report.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "the oracle disagrees: see its words above"
    );
    String::from_utf8(output.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}
