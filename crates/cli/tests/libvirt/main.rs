//! Tests guests of a real libvirt, whose disks the hook adds and removes.

use std::process::{Command, Stdio};

const WORLD: &str = include_str!("world.sh");
const OTHER_HOST: &str = include_str!("other_host.sh");
const SCENARIO: &str = include_str!("scenario.sh");
const HOOK: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../packaging/libvirt/qemu.d/fathom"
);
/// Timeout of the whole scenario in seconds.
const LIMIT: &str = "600";

/// Runs `scenario.sh` in namespaces of its own, because libvirt's directories are fixed.
#[test]
#[ignore = "needs root: mounts"]
fn disks_of_a_domain_come_and_go_with_its_guest() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    for (name, text) in [
        ("world.sh", WORLD),
        ("other_host.sh", OTHER_HOST),
        ("scenario.sh", SCENARIO),
    ] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let output = Command::new("timeout")
        .args([
            "--kill-after=5",
            LIMIT,
            "unshare",
            "--mount",
            "--pid",
            "--fork",
        ])
        .args(["--mount-proc", "--kill-child", "bash", "scenario.sh"])
        .current_dir(dir.path())
        .env("FATHOM", env!("CARGO_BIN_EXE_fathom"))
        .env("HOOK", HOOK)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
}
