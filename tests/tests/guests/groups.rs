//! Tests limits of tenants with control groups of version 2, in a group that is delegated as
//! systemd does.
//!
//! The test machine may have control groups of version 1, so a guest mounts its own.

use std::time::Duration;

use fathom_lab::{Guest, Machine};
use fathom_tests::fathom;

const STEP: Duration = Duration::from_secs(120);

const CONF: &str = r#"
api = { socket = "/tmp/c" }
stop-timeout = "3s"
[tenants]
memory-max = "64M"
cpu-max = "20%"
tasks-max = 100
[tenant.b]
memory-max = "off"
cpu-max = "off"
[[disk]]
name = "a"
image = "memory:256M"
vhost-user = "/tmp/a.s"
[[disk]]
name = "b"
image = "null:1M"
vhost-user = "/tmp/b.s"
"#;

/// Shell functions: the places of the groups, and `serve`, which starts a server in the group `$1`.
const PRELUDE: &str = r#"
set -o pipefail
G=/sys/fs/cgroup
S=$G/fathom.service
serve() {
    rm -f /tmp/log
    sh -c "echo 0 > $1/cgroup.procs; exec fathom serve --config /tmp/conf" > /tmp/log 2>&1 < /dev/null &
}
ready() {
    until grep -q 'the API is at' /tmp/log; do sleep 0.2; done
}
pid() {
    fathom info --disk $1 --json /tmp/c | sed 's/.*"pid":\([0-9]*\).*/\1/'
}
"#;

struct Host(Guest);

impl Host {
    fn sh(&mut self, script: &str) -> String {
        let script = format!("{PRELUDE}{script}");
        let said = self.0.check(&script, STEP).unwrap_or_else(|error| {
            let log = self.0.run("cat /tmp/log", STEP).unwrap().text;
            panic!("{error}\nThe server's log:\n{log}")
        });
        said.trim().to_owned()
    }

    /// Returns the contents of a file of the group that a process is in.
    fn of(&mut self, pid: &str, file: &str) -> String {
        self.sh(&format!(
            "cat $G$(sed 's/^0:://' /proc/{pid}/cgroup)/{file}"
        ))
    }
}

#[test]
fn tenants_have_groups_in_the_one_that_is_delegated() {
    let machine = Machine {
        memory_mib: 1024,
        programs: vec![fathom()],
        // With the tools, programs are started in a way in which they cannot start others.
        tools: false,
        ..Machine::default()
    };
    let mut host = Host(Guest::boot(&machine).unwrap());
    host.sh(&format!(
        "mkdir -p /tmp $G; mount -t cgroup2 none $G\n\
         echo '+memory +cpu +pids' > $G/cgroup.subtree_control; mkdir $S\n\
         cat > /tmp/conf <<'END'\n{CONF}\nEND"
    ));
    host.sh("serve $S; ready");
    let [a, b] = ["a", "b"].map(|disk| host.sh(&format!("pid {disk}")));
    for (file, of_a, of_b) in [
        ("memory.max", "67108864", "max"),
        ("memory.swap.max", "0", "max"),
        ("cpu.max", "20000 100000", "max 100000"),
        ("pids.max", "100", "100"),
    ] {
        assert_eq!(host.of(&a, file), of_a, "{file}");
        assert_eq!(host.of(&b, file), of_b, "{file}");
    }
    assert_eq!(host.of(&a, "cgroup.procs"), a);
    let info = host.sh("fathom info --disk a /tmp/c");
    assert!(
        info.contains(" of 64 MiB of memory, 20% of a CPU"),
        "{info}"
    );
    // A tenant that exceeds its memory limit is killed alone.
    host.sh(
        "if fathom bench --vhost-user /tmp/a.s --rw write --bs 64k --size 256M --overwrite \
         --runtime 100; then exit 9; fi",
    );
    host.sh("until grep -q 'needed more than its memory-max' /tmp/log; do sleep 0.2; done");
    host.sh(&format!(
        "until pid a && [ $(pid a) != {a} ]; do sleep 0.2; done"
    ));
    assert_eq!(host.sh("pid b"), b);
    // The next supervisor uses the same groups, and so do its tenants.
    let (places, dirs) = (
        "cd $S; echo fathom-tenants-*",
        "cd $S; echo fathom-tenants-*/tenant-*",
    );
    let before = host.sh(dirs);
    host.sh("fathom upgrade /tmp/c || true");
    assert_ne!(host.sh("pid b"), b);
    assert_eq!(host.sh(dirs), before);
    let b = host.sh("pid b");
    assert_eq!(host.of(&b, "pids.max"), "100");
    // The next server removes groups that a killed one has left.
    let left = host.sh(places);
    host.sh("kill -9 $(cat $S/supervisor/cgroup.procs)\n\
         until [ -z \"$(cat $S/fathom-*/tenant-*/cgroup.procs)\" ]; do sleep 0.2; done");
    assert_eq!(host.sh(places), left);
    host.sh("serve $S/supervisor; ready");
    assert_ne!(host.sh(places), left);
    host.sh("fathom quit /tmp/c\n\
         until [ -z \"$(cat $S/supervisor/cgroup.procs)\" ]; do sleep 0.2; done");
    assert_eq!(host.sh("ls $S | grep fathom || true"), "");
    // The server does not start in a group with other processes, or without the controllers.
    let refused = "until grep -q '^fathom: ' /tmp/log; do sleep 0.2; done; cat /tmp/log";
    let said = host.sh(&format!(
        "mkdir $G/shared; (echo 0 > $G/shared/cgroup.procs; exec sleep 1000) > /dev/null 2>&1 &\n\
         sleep 1; serve $G/shared; {refused}"
    ));
    assert!(
        said.contains("memory-max: other processes are in"),
        "{said}"
    );
    let said = host.sh(&format!("mkdir -p $G/x/y; serve $G/x/y; {refused}"));
    assert!(
        said.contains("memory-max: control group controller 'memory' is not available"),
        "{said}"
    );
    host.0.power_off().unwrap();
}
