//! Runs what the pages show: all commands of a page in one shell.
//!
//! A block of another language that has a file name is written to that file. The words after `sh`
//! say how a script is run: `server` runs in the background, and `fails` must fail. `elsewhere`
//! needs what a test does not have, such as a package's installation, another VMM, or an hour.
//! Another test checks only the arguments of `fathom` in such a block.
//!
//! A comment that begins with `<!-- sh` is such a block that readers need not see.

use super::pages::Page;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

/// Timeout of a page in seconds. Only a hang reaches it.
const LIMIT: &str = "600";

/// Commands that run before each page.
///
/// The commands give the page empty directories and ports of its own, so that it touches neither
/// those of the machine nor those of other pages.
const BEFORE: &str = r#"
set -eu
mount -t tmpfs none /run
mount -t tmpfs none /srv
export HOME=/srv XDG_RUNTIME_DIR=
echo '127.0.0.1 localhost server' >/run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
mkdir /run/fathom
cd /srv
logs=0
# A program that goes on, once it has said that it does what it is for; or QEMU, which says nothing.
begin() {
    logs=$((logs + 1))
    log=$LOGS/$logs
    setsid sh -euc "$1" >"$log" 2>&1 &
    case "$1" in *qemu*) sleep 2; kill -0 $!; return;; esac
    for try in $(seq 300); do
        ! grep -qE 'serving|waiting for disks|the API is at' "$log" || return 0
        kill -0 $! 2>/dev/null || break
        sleep 0.1
    done
    cat "$log"
    return 1
}
"#;

/// Runs a page. Returns what went wrong, if anything.
pub fn all_of(page: &Page) -> Option<String> {
    let blocks = page.blocks.iter();
    let blocks: Vec<_> = blocks.filter(|block| !block.is("elsewhere")).collect();
    if blocks.is_empty() {
        return None;
    }
    let mut script = BEFORE.to_owned();
    for block in blocks {
        writeln!(script, "echo '--- {}:{}'", page.path, block.line).unwrap();
        let quoted = block.text.replace('\'', r"'\''");
        match () {
            () if block.file.is_some() => {
                let file = block.file.as_deref().unwrap_or_default();
                writeln!(
                    script,
                    "cat >{file} <<'END OF FILE'\n{}END OF FILE",
                    block.text
                )
                .unwrap();
            }
            () if block.is("server") => writeln!(script, "begin 'exec {quoted}'").unwrap(),
            () if block.is("fails") => {
                writeln!(script, "! sh -euc '{quoted}'").unwrap();
            }
            () => script.push_str(&block.text),
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page.sh");
    fs::write(&file, script).unwrap();
    let program = env!("CARGO_BIN_EXE_fathom");
    let programs = program.strip_suffix("/fathom").unwrap();
    let path = format!("{programs}:{}:/usr/sbin:/sbin", env::var("PATH").unwrap());
    // The processes that a page starts end with it: they are in a PID namespace of their own.
    let mut command = Command::new("timeout");
    command.args([
        "--signal=KILL",
        LIMIT,
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--fork",
    ]);
    command.arg("--mount-proc").arg("--kill-child");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let logs = dir.path().join("logs");
    fs::create_dir(&logs).unwrap();
    let output = command.arg("bash").arg(&file).env("PATH", path);
    let output = output.env("ROOT", super::root());
    let output = output.env("LOGS", &logs).stdin(Stdio::null());
    let output = output.output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let status = output.status;
    (!status.success()).then(|| {
        let logs = all_logs(&logs);
        format!("{}: {status}\n{out}\n{err}{logs}", page.path)
    })
}

/// Returns the logs of a page's servers, in the order in which they were started.
fn all_logs(dir: &Path) -> String {
    let numbers = (1..).map(|number| (number, dir.join(format!("{number}"))));
    let logs = numbers.map_while(|(number, path)| Some((number, fs::read(path).ok()?)));
    let texts = logs.map(|(number, log)| {
        let log = String::from_utf8_lossy(&log);
        format!("\n--- log of server {number}\n{log}")
    });
    texts.collect()
}

#[test]
fn failure_of_a_page_shows_the_logs_of_its_servers() {
    let text = "```sh server\nsh -c \"echo why it failed >&2; echo serving; sleep 60\"\n```\n\n```sh\nfalse\n```\n";
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("page.md"), text).unwrap();
    let page = Page::read(dir.path(), "page.md");
    let said = all_of(&page).unwrap();
    assert!(
        said.contains("--- log of server 1\nwhy it failed\nserving"),
        "{said}"
    );
}
