//! The agent in the guest: what scripts print and how they end, also when they do not.

use std::time::Duration;

use fathom_lab::{Error, Guest, Machine};

const SOON: Duration = Duration::from_secs(60);

#[test]
fn scripts_end_or_are_given_up() {
    let mut guest = Guest::boot(&Machine {
        tools: false,
        ..Machine::default()
    })
    .unwrap();
    let output = guest.run("echo one; echo two >&2; exit 3", SOON).unwrap();
    assert_eq!((output.status, output.text.as_str()), (3, "one\ntwo\n"));

    let output = guest
        .run("echo before; sleep 1000", Duration::from_secs(2))
        .unwrap();
    assert_eq!(output.status, 124);
    assert!(output.text.starts_with("before\n"), "{}", output.text);
    assert!(
        output.text.contains("did not end in time"),
        "{}",
        output.text
    );

    // The one given up does not disturb those that follow; long scripts and answers come through.
    let long = "x".repeat(100_000);
    let echoed = guest.check(&format!("echo {long}"), SOON).unwrap();
    assert_eq!(echoed.trim(), long);
    let failed = guest
        .check("echo the reason; false; echo not reached", SOON)
        .unwrap_err();
    assert!(matches!(failed, Error::Guest { status: 1, .. }));
    let said = failed.to_string();
    assert!(
        said.contains("the reason") && !said.contains("| not reached"),
        "{said}"
    );

    guest.reboot().unwrap();
    assert_eq!(guest.check("echo again", SOON).unwrap(), "again\n");
    guest.power_off().unwrap();
}
