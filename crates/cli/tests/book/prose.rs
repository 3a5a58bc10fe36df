//! Checks the language of the documentation with `tools/prose.py`.

use super::root;
use std::process::Command;

#[test]
fn documentation_is_in_plain_english() {
    let check = Command::new("python3")
        .arg(root().join("tools/prose.py"))
        .output();
    let check = check.expect("python3 is installed by `make setup`");
    let found = String::from_utf8_lossy(&check.stdout);
    let errors = String::from_utf8_lossy(&check.stderr);
    assert!(check.status.success(), "{found}{errors}");
}
