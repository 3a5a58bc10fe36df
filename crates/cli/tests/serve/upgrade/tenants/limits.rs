//! Checks that limits apply under every supervisor, and to every process of a tenant.

use super::{Chain, configured, disk};
use crate::support::{eventually, stdout_of};
use crate::tenants::limits::{cpu_limit, group, memory_limit, servers, tasks_limit};
use std::fs;

const MIB: i64 = 1 << 20;

fn reconfigure(chain: &Chain, from: &str, to: &str) {
    let conf = chain.server.path("conf");
    let text = fs::read_to_string(&conf).unwrap();
    assert!(text.contains(from));
    fs::write(&conf, text.replace(from, to)).unwrap();
}

#[test]
fn limits_hold_on_and_are_those_of_the_new_configuration() {
    let disks = [
        disk("a", "null:1M", ""),
        disk(
            "memory",
            "memory:8M",
            "filters = ['fault:hang=yes,op=flush']",
        ),
    ];
    let first = "[tenants]\nmemory-max = '64M'\ncpu-max = '50%'";
    let mut chain = configured(&format!("{first}\n{}", disks.concat()));
    let of_a = group(chain.tenant("a"), "memory");
    for _ in 0..2 {
        chain.upgrade_in_part();
        let (a, stays) = (chain.tenant("a"), chain.tenant("memory"));
        assert_eq!(group(a, "memory"), of_a);
        assert_eq!((memory_limit(a), cpu_limit(a)), (64 * MIB, 50_000));
        assert_eq!(memory_limit(stays), 64 * MIB);
        let shown = chain.show("memory").unwrap();
        assert_eq!(shown["state"]["limits"]["memory_max"], 64 * MIB);
    }
    // A successor that fails removes no groups.
    chain.refused(&["--binary", "/bin/false"], "");
    assert!(of_a.exists());
    chain.kill_tenant("a");
    assert_eq!(memory_limit(chain.tenant("a")), 64 * MIB);
    stdout_of(&["disk", "remove", &chain.server.api(), "--disk", "memory"]);
    let second = "[tenants]\nmemory-max = '96M'\ntasks-max = 200";
    reconfigure(&chain, first, second);
    chain.upgrade(&[]);
    let a = chain.tenant("a");
    assert_eq!((memory_limit(a), cpu_limit(a)), (96 * MIB, -1));
    assert_eq!(tasks_limit(a), 200);
    let dirs = servers(a);
    chain.kill_tenant("a");
    let a = chain.tenant("a");
    assert_eq!((memory_limit(a), tasks_limit(a)), (96 * MIB, 200));
    // Removes all limits.
    reconfigure(&chain, second, "[tenants]");
    chain.upgrade(&[]);
    let limits = chain.show("a").unwrap()["state"]["limits"].clone();
    assert!(
        limits["memory_max"].is_null() && limits["tasks_max"].is_null(),
        "{limits}"
    );
    chain.quit();
    for dir in dirs {
        eventually("the groups are gone", || (!dir.exists()).then_some(()));
    }
}
