//! Checks `fathom group`: disks that share limits.

use crate::keep::{add, again, disks, seen, start};
use crate::support::{Served, refused, short_dir, stdout_of};
use crate::tenants;

fn list(served: &Served) -> String {
    stdout_of(&["group", "list", "--server", &served.api()])
}

fn set(served: &Served, args: &[&str]) -> String {
    let server = ["--server", &served.api()];
    stdout_of(&[&["group", "set"], args, &server].concat())
}

#[test]
fn a_groups_limits_are_those_of_all_its_disks_and_stay_so() {
    let served = start(short_dir(), "");
    assert_eq!(list(&served), "");
    let other = ["--filter", "throttle:iops-total=5,group=other"];
    let joins = ["--filter", "throttle:group=g"];
    add(
        &served,
        "b",
        &["--filter", "throttle:iops-total=100,group=g"],
    );
    add(&served, "a", &[&other[..], &joins].concat());
    add(&served, "c", &["--filter", "throttle:iops-total=9"]);
    let listed = "g: throttle:iops-total=100: a, b\nother: throttle:iops-total=5: a\n";
    assert_eq!(list(&served), listed);

    let now = "g: throttle:bps-read=1M,iops-total=7: a, b\n";
    let changed = set(&served, &["g", "iops-total=7", "bps-read=1M"]);
    assert_eq!(changed, now);
    let kept = [
        seen(
            "a",
            true,
            "throttle:iops-total=5,group=other throttle:group=g,bps-read=1M,iops-total=7",
        ),
        seen("b", true, "throttle:group=g,bps-read=1M,iops-total=7"),
        seen("c", true, "throttle:iops-total=9"),
    ];
    let served = again(served, "TERM", "");
    assert_eq!(disks(&served), kept);
    assert!(list(&served).starts_with(now), "{}", list(&served));

    // A transient change is lost at restart.
    let changed = set(&served, &["g", "iops-total=", "--transient"]);
    assert_eq!(changed, "g: throttle:bps-read=1M: a, b\n");
    let served = again(served, "TERM", "");
    assert_eq!(disks(&served), kept);

    // Invalid changes have no effect.
    let api = served.api();
    for (args, words) in [
        (["G", "iops-total=1"], ["throttle group 'G'", "g, other"]),
        (["g", "iops-total=many"], ["iops-total", "many"]),
        (["g", "iops=1"], ["did you mean 'iops-read'?", "'iops'"]),
        (["g", "group=other"], ["group", "while the disk is served"]),
    ] {
        let args = [&["group", "set", "--server", &api], &args[..]].concat();
        refused(1, &args, &words);
    }
    assert_eq!(disks(&served), kept);
    // The group disappears with its last disk.
    for disk in ["a", "b"] {
        stdout_of(&["disk", "remove", &api, "--disk", disk]);
    }
    assert_eq!(list(&served), "");
}

#[test]
fn tenants_with_a_group_of_that_name_are_all_told() {
    let filter = "filters = ['throttle:iops-total=100,group=g']";
    let of_one = format!("tenant = 'one'\n{filter}");
    let disks = [
        ("a", "null:1M", &*of_one),
        ("b", "null:1M", &*of_one),
        ("c", "null:1M", filter),
    ];
    let served = tenants::start(short_dir(), &disks);
    let listed =
        |limits: &str| format!("g (tenant c): {limits}: c\ng (tenant one): {limits}: a, b\n");
    assert_eq!(list(&served), listed("throttle:iops-total=100"));
    assert_eq!(
        set(&served, &["g", "iops-total=3"]),
        listed("throttle:iops-total=3")
    );
    assert_eq!(list(&served), listed("throttle:iops-total=3"));
}
