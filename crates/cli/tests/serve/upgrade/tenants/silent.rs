//! Checks that a tenant that does not respond delays neither an upgrade of the server nor others.

use super::{Chain, disk, start};
use crate::support::{eventually, fathom, send, stdout_of};
use serde_json::Value;
use std::fs;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Returns the number of processes of this tenant.
fn processes(tenant: &str, of: &Chain) -> usize {
    let socket = of.server.dir.path().display().to_string();
    assert!(!socket.is_empty());
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let wanted = format!("fathom-tenant\0tenant\0{tenant}\0");
    lines.filter(|line| line == wanted.as_bytes()).count()
}

/// Sets a flag when dropped, also by a panic.
struct Flag<'a>(&'a AtomicBool);

impl Drop for Flag<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The upgrade cancels the tenant's command after a while, and those of clients that keep listing
/// all groups. The tenant is stopped while the server is replaced, and is replaced itself when it
/// continues.
#[test]
fn tenant_that_owes_a_reply_does_not_prevent_an_upgrade() {
    // (No other test has a tenant of that name.)
    let name = "owes-a-reply";
    let mut chain = start(&[
        disk(
            name,
            "memory:8M",
            "filters = ['throttle:iops-total=1000000']",
        ),
        disk("b", "null:1M", ""),
    ]);
    let owing = chain.tenant(name);
    send("STOP", owing);
    let api = chain.server.api();
    let set = [
        "set",
        &api,
        "--disk",
        name,
        "throttle",
        "iops-total=2000000",
    ];
    let asked = fathom().args(set).stderr(Stdio::piped()).spawn().unwrap();
    let asked = asked.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&asked.stderr).into_owned();
    assert!(
        !asked.status.success() && said.contains("did not respond"),
        "{said}"
    );
    let upgrade = fathom()
        .args(["upgrade", &api, "--json"])
        .stdout(Stdio::piped())
        .spawn();
    let upgrade = upgrade.unwrap();
    let is_over = &AtomicBool::new(false);
    let list = || {
        while !is_over.load(Ordering::Relaxed) {
            // (This fails if the upgrade cancels the tenant's command.)
            let mut list = fathom();
            list.args(["group", "list", "--server", &api])
                .output()
                .unwrap();
        }
    };
    let output = thread::scope(|scope| {
        scope.spawn(list);
        scope.spawn(list);
        let _over = Flag(is_over);
        eventually("a process that is to take its place", || {
            (processes(name, &chain) == 2).then_some(())
        });
        send("CONT", owing);
        upgrade.wait_with_output().unwrap()
    });
    assert!(output.status.success());
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    chain.pid = answer["pid"].as_u64().unwrap();
    assert_eq!(answer["tenants"].as_array().unwrap().len(), 2);
    assert_ne!(chain.tenant(name), owing);
    stdout_of(&["stats", &api, "--disk", "b"]);
    chain.quit();
}
