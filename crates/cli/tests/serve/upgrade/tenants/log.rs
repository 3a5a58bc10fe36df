//! Checks that the server passes on what tenants write to their standard error, also after
//! upgrades.

use super::{Chain, disk, start};
use crate::support::eventually;
use std::fs::{File, OpenOptions};
use std::io::Write;

fn stderr(chain: &Chain, disk: &str) -> File {
    let path = format!("/proc/{}/fd/2", chain.tenant(disk));
    OpenOptions::new().write(true).open(path).unwrap()
}

fn is_said(chain: &Chain, line: &str) {
    eventually(line, || {
        let log = chain.server.log();
        log.lines().any(|said| said == line).then_some(())
    });
}

#[test]
fn whoever_is_the_supervisor_reads_what_tenants_say() {
    let mut chain = start(&[
        disk("far", "null:1M", ""),
        disk(
            "memory",
            "memory:8M",
            "filters = ['fault:hang=yes,op=flush']",
        ),
    ]);
    // The process of this tenant stays.
    let mut stays = stderr(&chain, "memory");
    for round in 0..3 {
        write!(stays, "half {round}").unwrap();
        chain.upgrade_in_part();
        writeln!(stays, "and the remaining data").unwrap();
        is_said(&chain, &format!("[memory] half {round}"));
        writeln!(stderr(&chain, "far"), "a new one {round}").unwrap();
        is_said(&chain, &format!("[far] a new one {round}"));
    }
    is_said(&chain, "[memory] and the remaining data");
    // A successor that fails does not disturb this either.
    chain.refused(&["--binary", "/bin/false"], "");
    writeln!(stays, "after all").unwrap();
    is_said(&chain, "[memory] after all");
    chain.quit();
}
