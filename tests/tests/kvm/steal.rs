//! Tests that CPU time stolen from a guest is named as the limit of its disk, and is the limit.

use std::time::Duration;

use fathom_lab::KvmHost;
use fathom_lab::experiment::{Settings, find, nested};
use fathom_limiter::judge;
use fathom_run::evidence::Evidence;
use fathom_testing::decide;
use fathom_tests::fathom;

const SOON: Duration = Duration::from_secs(60);
/// Timeout of a cell in an emulated KVM host. A cell takes half a minute, unless it hangs for good.
const CELL: Duration = Duration::from_secs(150);

/// Only KVM tells a guest how much time is stolen from it.
///
/// The host has one CPU, which the guest's own QEMU needs now and then, so some time is always
/// stolen.
#[test]
fn steal_by_a_neighbour_is_named_as_the_limiter() {
    // Other programs may use this machine's CPUs for a while, and an emulated host may stand still.
    decide(|| a_guest_with_a_neighbour().unwrap());
}

fn a_guest_with_a_neighbour() -> Result<(), String> {
    let mut host = KvmHost::boot(&fathom()).unwrap();
    let alone = cached_reads(&mut host)?;
    let neighbour = "sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &";
    host.check(neighbour, SOON).unwrap();
    let beside = cached_reads(&mut host)?;
    let verdict = judge(&beside);
    let is_named = verdict.rule() == Some("steal") && verdict.subject() == Some("guest CPU 0");
    let share = |evidence: &Evidence| evidence.guest.as_ref().unwrap().steal[0];
    let is_its_doing = share(&beside) > 1.5 * share(&alone);
    let is_limit = alone.load.requests * 2 > beside.load.requests * 3;
    let said = format!("{verdict}\nalone: {alone:#?}\nbeside: {beside:#?}");
    eprintln!("{said}");
    let is_right = is_named && is_its_doing && is_limit;
    is_right.then_some(()).ok_or(said)
}

/// Returns the evidence of a guest's reads from its page cache, which keep its CPU busy and send no
/// requests to the host.
///
/// The guest sees none of the host's threads, which would show the same.
fn cached_reads(host: &mut KvmHost) -> Result<Evidence, String> {
    let defaults = Settings::defaults(find("settings").unwrap().parameters());
    let settings = [("direct", "off"), ("size", "1M"), ("runtime", "5s")].into_iter();
    let settings = settings.fold(defaults, |all, (name, value)| all.with(name, value));
    let dir = tempfile::tempdir().unwrap();
    let mut progress = |step: &str| eprintln!("{step}");
    let seen = nested::run_within(host, "settings", &settings, dir.path(), CELL, &mut progress);
    let seen = seen.map_err(|error| error.to_string())?;
    let Evidence { load, guest, .. } = seen.evidence.unwrap();
    Ok(Evidence {
        seconds: load.seconds,
        load,
        guest,
        ..Evidence::default()
    })
}
