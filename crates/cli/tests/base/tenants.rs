//! Tests that tenants share a base image, and that no tenant can damage it for the others.

use crate::place::{Host, SIZE, STRIPE, Source};
use crate::support::{Served, eventually, fathom, short_dir, stdout_of};
use std::fs;
use std::process::Command;

#[test]
fn tenants_share_what_only_its_keeper_can_write_to() {
    let host = Host::new();
    let source = Source::sturdy(&host, &host.path("base.raw"), 1);
    let uri = source.uri();
    let dir = short_dir();
    let mut config = format!(
        "tenants = true\nsandbox = 'on'\napi = {{ socket = '{}' }}\n",
        dir.path().join("c").display()
    );
    for name in ["a", "b"] {
        let image = host.overlay(name, &uri, "raw");
        config += &format!(
            "[[disk]]\nname = '{name}'\nimage = '{image}'\nformat = 'qcow2'\nbase = '{uri}'\n\
             base-cache = '{}'\nbase-fetch = 'off'\nvhost-user = '{}'\n",
            host.arg("cache"),
            dir.path().join(name).display()
        );
    }
    fs::write(dir.path().join("conf"), config).unwrap();
    let mut command = fathom();
    command
        .arg("serve")
        .arg("--config")
        .arg(dir.path().join("conf"));
    let mut served = Served::spawn(command, dir);
    served.wait_for("the API is at");
    let read = |name: &str| {
        let socket = served.arg(name);
        let all = (SIZE / STRIPE).to_string();
        stdout_of(&[
            "bench",
            "--vhost-user",
            &socket,
            "--rw",
            "read",
            "--bs",
            "256k",
            "--number-ios",
            &all,
        ]);
    };
    read("a");
    let once = source.reads().len();
    assert!(once >= (SIZE / STRIPE) as usize);
    read("b");
    assert_eq!(source.reads().len(), once);
    let keepers = host.keepers();
    assert_eq!(keepers.len(), 1);
    // The tenants have opened the files of the cache read-only.
    let tenants = Command::new("pgrep")
        .args(["-f", "^fathom-tenant"])
        .output()
        .unwrap();
    let tenants = String::from_utf8(tenants.stdout).unwrap();
    let mut found = 0;
    for pid in tenants.lines() {
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for file in files.filter_map(Result::ok) {
            let target = fs::read_link(file.path()).unwrap_or_default();
            if target.starts_with(host.path("cache")) {
                let info = fs::read_to_string(format!(
                    "/proc/{pid}/fdinfo/{}",
                    file.file_name().to_string_lossy()
                ));
                let flags = info.unwrap_or_default();
                let flags = flags
                    .lines()
                    .find_map(|line| line.strip_prefix("flags:"))
                    .map(str::trim)
                    .map(str::to_owned);
                let flags = u32::from_str_radix(&flags.unwrap_or_default(), 8).unwrap();
                assert_eq!(
                    flags & libc::O_ACCMODE as u32,
                    libc::O_RDONLY as u32,
                    "{target:?}"
                );
                found += 1;
            }
        }
    }
    assert!(found >= 4, "{found}");
    // After the keeper has ended, tenants reach a new one through the supervisor.
    host.kill_keepers();
    read("b");
    eventually("another keeper", || {
        (host.keepers().len() == 1).then_some(())
    });
    assert_ne!(host.keepers(), keepers);
    read("a");
}
