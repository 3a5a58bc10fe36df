//! The agent in the guest: what scripts print and how they end, also when they do not.

use std::time::Duration;

use fathom_lab::{Error, Guest, Machine};

/// Emulated guests take seconds; on a loaded machine, minutes.
const SOON: Duration = Duration::from_secs(300);

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
        .run("echo before; sleep 1000", Duration::from_secs(5))
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

#[test]
fn output_streams_answers_and_folders_come_out() {
    let mut guest = Guest::boot(&Machine {
        tools: false,
        ..Machine::default()
    })
    .unwrap();
    // More than the port, the pipe and the host's queue hold together, and its exact bytes.
    let mut received = Vec::new();
    let script = "seq 1 1000000; echo a warning >&2; exit 3";
    let output = guest
        .stream(script, SOON, &mut |chunk| {
            received.extend_from_slice(chunk);
            Ok(())
        })
        .unwrap();
    assert_eq!((output.status, output.text.as_str()), (3, "a warning"));
    let wanted: String = (1..=1_000_000).map(|n| format!("{n}\n")).collect();
    assert!(received == wanted.as_bytes(), "{} bytes", received.len());

    let mut lines = Vec::new();
    let script = "echo ready; read -r answer; echo \"got $answer\"";
    let output = guest
        .converse(script, SOON, &mut |line| {
            lines.push(line.to_owned());
            Ok((line == "ready").then(|| "go on".to_owned()))
        })
        .unwrap();
    assert_eq!(output.status, 0, "{}", output.text);
    assert_eq!(lines, ["ready", "got go on"]);

    let dir = tempfile::tempdir().unwrap();
    guest
        .check("mkdir -p /tmp/out/deep; seq 1 9 >/tmp/out/deep/file", SOON)
        .unwrap();
    guest.fetch("/tmp/out", dir.path(), SOON).unwrap();
    let text = std::fs::read_to_string(dir.path().join("deep/file")).unwrap();
    assert_eq!(text.lines().count(), 9);
    let missing = guest.fetch("/tmp/nothing", dir.path(), SOON).unwrap_err();
    assert!(missing.to_string().contains("nothing"), "{missing}");
}

#[test]
fn a_guest_that_panics_shows_its_console() {
    let mut guest = Guest::boot(&Machine {
        tools: false,
        extra: vec!["-no-reboot".into()],
        ..Machine::default()
    })
    .unwrap();
    let script = "echo 7 >/proc/sys/kernel/printk; echo c >/proc/sysrq-trigger; sleep 60";
    let error = guest.stream(script, SOON, &mut |_| Ok(())).unwrap_err();
    let said = error.to_string();
    assert!(
        said.starts_with("the guest's kernel panicked: sysrq triggered crash"),
        "{said}"
    );
}

/// A machine whose first process is not the lab's.
fn machine_with(init: &str, patience: Duration) -> Machine {
    let words = format!("loglevel=7 rdinit={init}");
    Machine {
        tools: false,
        append: words.split(' ').map(str::to_owned).collect(),
        extra: vec!["-no-reboot".into()],
        patience,
        ..Machine::default()
    }
}

const RUN: &str = "Run /bin/busybox as init process";

#[test]
fn a_guest_that_hangs_is_given_up_with_its_console() {
    let patience = Duration::from_secs(3);
    let machine = machine_with("/bin/busybox -- sleep 1000", patience);
    let mut guest = Guest::start(&machine).unwrap();
    // However long the machine takes until there.
    let console = guest.console();
    console.wait_for(RUN, 0, Duration::from_secs(180)).unwrap();
    let error = guest.wait_ready(0).expect_err("it does not come up");
    let said = error.to_string();
    let (line, console) = said.split_once('\n').unwrap();
    assert_eq!(line, "waiting for the guest to boot: nothing after 3 s");
    assert!(console.contains(RUN), "{said}");
}

#[test]
fn a_guest_whose_timer_has_gone_is_reset() {
    let words = r#"rdinit=/bin/busybox -- sh -c "echo Possible timer handling issue; sleep 1000""#;
    let mut guest = Guest::start(&Machine {
        tools: false,
        append: vec![words.into()],
        patience: Duration::from_secs(60),
        ..Machine::default()
    })
    .unwrap();
    let (console, qemu) = (guest.console().clone(), guest.pid());
    let waiting = std::thread::spawn(move || guest.wait_ready(0));
    let mut from = 0;
    for boot in 1..=3 {
        let seen = console.wait_for("Possible timer", from, Duration::from_secs(180));
        seen.unwrap_or_else(|error| panic!("boot {boot}: {error}"));
        from = console.position();
    }
    let kill = std::process::Command::new("kill")
        .arg(qemu.to_string())
        .status();
    assert!(kill.unwrap().success());
    waiting.join().unwrap().expect_err("it does not come up");
}

#[test]
fn a_guest_that_panics_says_why() {
    let machine = machine_with("/bin/busybox -- false", Duration::from_secs(180));
    let error = Guest::boot(&machine).expect_err("it does not come up");
    let said = error.to_string();
    let (line, console) = said.split_once('\n').unwrap();
    let why = "the guest's kernel panicked: Attempted to kill init! exitcode=";
    assert!(line.starts_with(why), "{said}");
    assert!(console.contains(RUN), "{said}");
}
