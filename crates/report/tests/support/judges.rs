//! What a report is held against: reports that were read and found good, a width, and an oracle that
//! is not ours.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn golden(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    tests.join("data").join(name)
}

/// With FATHOM_BLESS set, what is written now becomes what is expected: read the difference.
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

/// How many figures the oracle has found to be right.
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
