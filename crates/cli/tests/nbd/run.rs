//! Tests `fathom serve --run`, which serves a disk while a command runs.

use super::support::{Kept, as_arg, disk_dir, eventually, fathom, refused, run, stdout_of};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const SIZE: usize = 8 << 20;

/// Runs `fathom serve DISK ARGS --run COMMAND`. Returns the exit status, stdout and stderr.
fn serve(disk: &str, args: &[&str], command: &str) -> (Option<i32>, String, String) {
    let all = [&["serve", disk], args, &["--run", command]].concat();
    let output = run(&all);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn command_reaches_the_disk_and_its_status_is_the_status() {
    let (status, stdout, stderr) = serve("memory:8M", &[], r#"nbdinfo --size "$uri"; exit 7"#);
    assert_eq!((status, stdout.trim()), (Some(7), "8388608"), "{stderr}");
    // The server's final output is not mixed with the output of the command.
    let stats = stderr.contains("total") || stderr.contains("no request");
    assert!(stats && !stderr.contains("INFO"), "{stderr}");
    let killed = serve("memory:8M", &[], "kill -s KILL $$");
    assert_eq!(killed.0, Some(128 + 9));
}

#[test]
fn data_of_the_command_is_in_the_image_afterwards() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; SIZE]).unwrap();
    let write = r#"qemu-io -f raw -c "write -P 7 1M 64k" "$uri""#;
    let (status, _, stderr) = serve(&as_arg(&image), &["--export-name", "a disk/&1"], write);
    assert_eq!(status, Some(0), "{stderr}");
    let data = fs::read(&image).unwrap();
    assert!(data[1 << 20..][..64 << 10].iter().all(|byte| *byte == 7));
    assert_eq!(data.iter().filter(|byte| **byte != 0).count(), 64 << 10);
}

#[test]
fn both_kinds_of_sockets_are_temporary() {
    let args = ["--vhost-user", "-", "--nbd", "unix:-"];
    let check = r#"test -S "$vhost_user" && test -S "$unixsocket" && dirname "$vhost_user""#;
    let (status, stdout, stderr) = serve("memory:8M", &args, check);
    assert_eq!(status, Some(0), "{stderr}");
    assert!(!Path::new(stdout.trim()).exists(), "{stdout}");
    // A disk that is served only by vhost-user has no URI.
    let (status, stdout, _) = serve("memory:8M", &args[..2], r#"echo "-$uri-""#);
    assert_eq!((status, stdout.trim()), (Some(0), "--"));
    for temporary in [["--vhost-user", "-"], ["--nbd", "unix:-"]] {
        let args = [&["serve", "memory:8M"][..], &temporary].concat();
        refused(1, &args, &["--run"]);
    }
}

#[test]
fn command_is_not_run_without_the_disk() {
    let dir = disk_dir();
    let (missing, ran) = (dir.path().join("missing"), dir.path().join("ran"));
    let touch = format!("touch {}", ran.display());
    let (status, stdout, stderr) = serve(&as_arg(&missing), &[], &touch);
    assert_eq!((status, stdout.as_str()), (Some(1), ""));
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("missing"), "{stderr}");
    assert!(!ran.exists());
    refused(2, &["serve", "--config", "x", "--run", "true"], &["--run"]);
}

#[test]
fn upgraded_server_stops_with_the_command() {
    let dir = disk_dir();
    let pid = dir.path().join("pid");
    let script = format!(
        r#"set -e
        qemu-io -f raw -c "write -P 7 0 64k" "$uri"
        "{fathom}" upgrade {api} --json > {pid}
        qemu-io -f raw -c "read -P 7 0 64k" "$uri""#,
        fathom = env!("CARGO_BIN_EXE_fathom"),
        api = dir.path().join("api").display(),
        pid = pid.display(),
    );
    let api = as_arg(&dir.path().join("api"));
    let (status, _, stderr) = serve("memory:8M", &["--api", &api], &script);
    assert_eq!(status, Some(0), "{stderr}");
    let answer: serde_json::Value = serde_json::from_slice(&fs::read(&pid).unwrap()).unwrap();
    let pid = answer["pid"].as_u64().expect("a process id");
    has_ended(pid).expect("the successor has stopped");
}

/// Starts a server whose command waits. Also returns the process ids of the server and the command.
fn start(dir: &Path) -> (Kept, u64, u64) {
    let started = dir.join("started");
    let command = format!(
        "echo $$ > {0}.new && mv {0}.new {0}; sleep 600 & wait",
        started.display()
    );
    let api = as_arg(&dir.join("api"));
    let mut serve = fathom();
    serve.args(["serve", "memory:8M", "--api", &api, "--run", &command]);
    // A process group of its own, as a shell creates for a command.
    let parent = Kept::spawn(serve.process_group(0));
    let shell = eventually("the command runs", || fs::read_to_string(&started).ok());
    let info: serde_json::Value =
        serde_json::from_str(&stdout_of(&["show", &api, "--json"])).unwrap();
    (
        parent,
        info["pid"].as_u64().unwrap(),
        shell.trim().parse().unwrap(),
    )
}

fn has_ended(pid: u64) -> Option<()> {
    // A process whose parent has been killed may be a zombie for a moment.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    (stat.is_empty() || stat.contains(") Z ")).then_some(())
}

fn kill_group(parent: &Kept, signal: &str) {
    let group = format!("-{}", parent.0.id());
    let sent = Command::new("kill")
        .args(["-s", signal, "--", &group])
        .status();
    assert!(sent.unwrap().success());
}

#[test]
fn signals_end_the_command_and_then_the_server() {
    for signal in ["TERM", "HUP", "INT"] {
        let dir = disk_dir();
        let (mut parent, server, shell) = start(dir.path());
        match signal {
            // Ctrl-C sends the signal to the terminal's whole foreground process group.
            "INT" => kill_group(&parent, signal),
            _ => parent.signal(signal),
        }
        let status = eventually("its end", || parent.0.try_wait().unwrap());
        assert!(status.code().unwrap() > 128, "{signal}: {status}");
        has_ended(server).expect("the server has stopped");
        has_ended(shell).expect("the command has ended");
        kill_group_if_any(&parent);
    }
}

/// Kills what the command has left behind.
fn kill_group_if_any(parent: &Kept) {
    let group = format!("-{}", parent.0.id());
    let mut kill = Command::new("kill");
    let _ = kill.args(["-s", "KILL", "--", &group]).output();
}

#[test]
fn server_stops_when_the_runner_of_its_command_is_killed() {
    let dir = disk_dir();
    let (mut parent, server, _) = start(dir.path());
    parent.signal("KILL");
    parent.0.wait().unwrap();
    eventually("the server's end", || has_ended(server));
    kill_group_if_any(&parent);
}

#[test]
fn killed_server_is_reported_when_the_command_has_ended() {
    let dir = disk_dir();
    let api = as_arg(&dir.path().join("api"));
    let kill = format!(
        r#"kill -s KILL $("{}" show {api} --json | sed 's/.*"pid":\([0-9]*\).*/\1/')"#,
        env!("CARGO_BIN_EXE_fathom")
    );
    let (status, _, stderr) = serve("memory:8M", &["--api", &api], &kill);
    assert_eq!(status, Some(1), "{stderr}");
    assert!(
        stderr.contains("the server failed (signal: 9 (SIGKILL))"),
        "{stderr}"
    );
}
