//! Checks `fathom top`: as text, as JSON, and in a terminal of tmux.

use crate::live::{server, uri};
use crate::support::{Kept, Served, eventually, fathom, refused, short_dir, stdout_of};
use fathom_testing::Deadline;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

fn lines_of(args: &[&str]) -> Vec<String> {
    let text = stdout_of(&[&["top", "--interval", "0.5"], args].concat());
    text.lines().map(str::to_owned).collect()
}

/// Starts a load that reads from the slow disk.
fn load(served: &Served) -> Kept {
    let uri = uri(served, "slow");
    let args = ["bench", "--nbd", &uri, "--rw", "randread", "--iodepth", "4"];
    Kept::spawn(fathom().args(args).args(["--runtime", "10m"]))
}

#[test]
fn text_and_json_are_for_who_has_no_screen() {
    let (served, _) = server("");
    let _load = load(&served);
    let api = served.api();
    eventually("requests", || {
        let lines = lines_of(&[&api, "--once"]);
        assert_eq!(lines.len(), 5, "{lines:#?}");
        assert!(
            lines[0].starts_with("servers 1, disks 3, IOPS read "),
            "{lines:#?}"
        );
        assert!(lines[1].starts_with("DISK") && lines[1].ends_with("LIMITED BY"));
        // The disk with the most requests comes first.
        let slow = &lines[2];
        let is_busy = slow.contains("delay:read=30ms filter: ");
        assert!(
            !is_busy
                || (slow.starts_with("slow") && slow.contains("1 NBD") && slow.contains("queue"))
        );
        assert!(!is_busy || slow.contains("30ms"), "{slow}");
        is_busy.then_some(())
    });
    let names = |lines: &[String]| -> Vec<_> {
        let rows = lines
            .iter()
            .skip(2)
            .map(|line| line.split(' ').next().unwrap().to_owned());
        rows.collect()
    };
    let by_name = lines_of(&[&api, "--once", "--sort", "disk"]);
    assert_eq!(names(&by_name), ["bad", "idle", "slow"]);
    let some = lines_of(&[&api, "--once", "--filter", "BAD"]);
    assert_eq!(names(&some), ["bad"]);
    let one = stdout_of(&["top", &api, "--once", "--json", "--filter", "slow"]);
    let one: Value = serde_json::from_str(&one).unwrap();
    let disks = one["servers"][0]["disks"].as_array().unwrap();
    assert_eq!((disks.len(), &disks[0]["name"]), (1, &"slow".into()));
    assert_eq!(disks[0]["limiter"]["kind"], "filter");
    let several = lines_of(&[&api, "--json", "-n", "3"]);
    let numbers: Vec<_> = { several.iter() }
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["servers"][0]["number"].clone())
        .collect();
    assert_eq!(numbers, [1, 2, 3]);
}

#[test]
fn all_servers_of_this_machine_are_found() {
    let dir = short_dir();
    let start = |name: &str| {
        let own = short_dir();
        let config = own.path().join("conf");
        let disk = format!(
            "[[disk]]\nname = '{name}'\nimage = 'memory:1M'\nvhost-user = '{}'\n",
            own.path().join("s").display()
        );
        fs::write(&config, disk).unwrap();
        let mut command = fathom();
        command.env("XDG_RUNTIME_DIR", dir.path());
        command.args(["serve", "--config"]).arg(config);
        let mut served = Served::spawn(command, own);
        served.wait_for("the API is at");
        served
    };
    let mut names: Vec<_> = (0..2)
        .map(|n| format!("top-{}-{n}", std::process::id()))
        .collect();
    let mut served: Vec<_> = names.iter().map(|name| start(name)).collect();
    let top = |more: &[&str]| {
        let mut command = fathom();
        command.env("XDG_RUNTIME_DIR", dir.path());
        command.args(["top", "--once", "--json"]).args(more);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let disks = |told: &Value| -> Vec<String> {
        let servers = told["servers"].as_array().unwrap().iter();
        let disks = servers.flat_map(|server| server["disks"].as_array().unwrap());
        disks
            .map(|disk| disk["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let found = disks(&top(&[]));
    assert!(names.iter().all(|name| found.contains(name)), "{found:?}");
    // The name of a disk selects that disk only.
    let one = disks(&top(&[&names[1]]));
    assert_eq!(one, names[1..]);
    served.pop().unwrap().terminate();
    names.pop();
    assert!(disks(&top(&[])).contains(&names[0]));
}

#[test]
fn what_cannot_be_is_said_in_a_line() {
    let (served, _) = server("");
    let api = served.api();
    for (args, words) in [
        (&["--interval", "0.1"][..], "from 500ms to 60s"),
        (&["--interval", "2min"], "is not a time like"),
        (&["--sort", "nothing"], "invalid value 'nothing'"),
        (&["-n", "0"], "must be 1 or more"),
        (&["--once", "-n", "2"], "cannot be used with"),
    ] {
        refused(2, &[&["top", &api], args].concat(), &[words]);
    }
    refused(
        1,
        &["top", "no-such-disk", "--once"],
        &["no disk or server 'no-such-disk'"],
    );
    refused(
        1,
        &["top", "/nothing/here", "--once"],
        &["no server listens there"],
    );
}

/// A terminal with a shell in it.
struct Terminal {
    dir: TempDir,
}

impl Terminal {
    /// Starts a terminal of this size. `environment` has variables, as arguments of env(1).
    fn start(width: u16, height: u16, environment: &[&str]) -> Terminal {
        let terminal = Terminal { dir: short_dir() };
        let (width, height) = (width.to_string(), height.to_string());
        let shell = format!("env PS1='> ' {} sh", environment.join(" "));
        let started = terminal.tmux(&["new-session", "-d", "-x", &width, "-y", &height, &shell]);
        assert!(
            started.status.success(),
            "{started:?} (tools/setup.sh installs tmux)"
        );
        terminal.wait_for(">");
        terminal
    }

    fn tmux(&self, args: &[&str]) -> Output {
        let mut tmux = Command::new("tmux");
        // Uses UTF-8 in any environment, and ignores the user's configuration.
        tmux.args(["-u", "-f", "/dev/null", "-S"])
            .arg(self.dir.path().join("t"));
        tmux.args(args).stdin(Stdio::null()).env_remove("TMUX");
        tmux.output()
            .expect("tmux is installed (tools/setup.sh does that)")
    }

    /// Presses keys, by their names in tmux, or types text.
    fn press(&self, keys: &[&str]) {
        let sent = self.tmux(&[&["send-keys", "--"], keys].concat());
        assert!(sent.status.success(), "{sent:?}");
    }

    fn run(&self, line: &str) {
        self.press(&[line, "Enter"]);
    }

    fn resize(&self, width: u16, height: u16) {
        let (width, height) = (width.to_string(), height.to_string());
        self.tmux(&["resize-window", "-x", &width, "-y", &height]);
    }

    fn screen(&self) -> String {
        String::from_utf8(self.tmux(&["capture-pane", "-p"]).stdout).unwrap()
    }

    fn ask(&self, what: &str) -> String {
        let said = self.tmux(&["display-message", "-p", what]).stdout;
        String::from_utf8(said).unwrap().trim().to_owned()
    }

    /// Waits until the screen has these words, and returns the screen.
    fn wait_for(&self, words: &str) -> String {
        let what = format!("'{words}' on the screen");
        let deadline = Deadline::new(&what);
        loop {
            let screen = self.screen();
            if screen.contains(words) {
                return screen;
            }
            deadline.check_with(|| screen);
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// Returns the terminal's settings as text. `mark` must not have been on the screen before.
    fn settings(&self, mark: &str) -> String {
        let file = self.dir.path().join(mark);
        self.run(&format!("stty -a > {}; echo {mark}-do''ne", file.display()));
        self.wait_for(&format!("{mark}-done"));
        fs::read_to_string(file).unwrap()
    }

    /// Checks that the terminal belongs to the shell again, with its former settings.
    fn is_given_back(&self, settings: &str, mark: &str) {
        self.wait_for("was-here");
        assert_eq!(self.ask("#{alternate_on} #{cursor_flag}"), "0 1");
        // (The size may be another one.)
        let of = |text: &str| {
            text.split_once(';')
                .unwrap()
                .1
                .split("; line")
                .last()
                .unwrap()
                .to_owned()
        };
        let flags = |text: &str| -> Vec<String> {
            let words = of(text);
            let words = words.split_whitespace().skip_while(|word| *word != "intr");
            words.map(str::to_owned).collect()
        };
        assert_eq!(flags(&self.settings(mark)), flags(settings));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

fn top(served: &Served) -> String {
    format!(
        "{} top -i 0.5 {}",
        env!("CARGO_BIN_EXE_fathom"),
        served.api()
    )
}

/// Returns the names of disks on the screen, from top to bottom.
fn disks(screen: &str) -> Vec<&str> {
    let rows = screen.lines().skip(3);
    let first = rows.filter_map(|line| line.split(' ').next());
    first
        .filter(|name| ["slow", "bad", "idle"].contains(name))
        .collect()
}

#[test]
fn a_screen_is_looked_at_and_left_as_it_was() {
    let (served, _) = server("");
    let _load = load(&served);
    let terminal = Terminal::start(80, 24, &["TERM=screen-256color", "LANG=C.UTF-8"]);
    let settings = terminal.settings("before");
    terminal.run("echo 'somebody was''-here'");
    terminal.wait_for("was-here");
    terminal.run(&top(&served));
    let screen = terminal.wait_for("delay:read=30ms filter: ");
    assert!(
        screen.starts_with("fathom top  1 server, 3 disks  IOPS r "),
        "{screen}"
    );
    assert_eq!(disks(&screen)[0], "slow", "{screen}");
    assert!(
        screen.contains("█device") && screen.contains("IOPS (down)"),
        "{screen}"
    );
    assert_eq!(terminal.ask("#{alternate_on} #{cursor_flag}"), "1 0");
    // Sorts by name in both directions.
    terminal.press(&["N"]);
    assert_eq!(disks(&terminal.wait_for("DISK▼")), ["bad", "idle", "slow"]);
    terminal.press(&["N"]);
    assert_eq!(disks(&terminal.wait_for("DISK▲")), ["slow", "idle", "bad"]);
    // Filters by name.
    terminal.press(&["/", "idl"]);
    terminal.wait_for("filter: idl");
    terminal.press(&["Enter"]);
    assert_eq!(disks(&terminal.wait_for(" /idl,")), ["idle"]);
    terminal.press(&["Escape"]);
    terminal.wait_for("bad");
    // Opens the columns and the help.
    terminal.press(&["f"]);
    terminal.wait_for("* c  DISK");
    terminal.press(&["d"]);
    terminal.wait_for("  d  GUEST");
    terminal.press(&["d", "Enter", "?"]);
    terminal.wait_for("Ctrl-C");
    terminal.press(&["x", "s", "9", "9", "Enter"]);
    terminal.wait_for("from 500ms to 60s");
    // Shows one disk, with latencies of 30 ms.
    terminal.press(&["Enter"]);
    let screen = terminal.wait_for("limited by: delay:read=30ms filter");
    assert!(
        screen.contains("slow  memory:16777216") && screen.contains("1 NBD"),
        "{screen}"
    );
    let screen = terminal.wait_for("now");
    assert!(
        screen.contains("ms│") && screen.contains("worker 0"),
        "{screen}"
    );
    assert!(screen.contains("queue 3"), "{screen}");
    // Resizes the terminal to a large size and to a tiny one.
    terminal.press(&["Escape"]);
    terminal.resize(160, 50);
    let screen = terminal.wait_for("LIMITED BY");
    assert!(screen.lines().count() >= 49, "{screen}");
    terminal.resize(30, 8);
    let screen = terminal.wait_for("q quit");
    assert!(
        screen.lines().all(|line| line.chars().count() <= 30),
        "{screen}"
    );
    terminal.resize(80, 24);
    terminal.wait_for("V used");
    // Upgrades the server meanwhile.
    terminal.press(&["Enter"]);
    terminal.wait_for("limited by");
    served.upgrade();
    let pid = || {
        let told = stdout_of(&["info", &served.api(), "--disk", "slow", "--json"]);
        serde_json::from_str::<Value>(&told).unwrap()["pid"].to_string()
    };
    terminal.wait_for(&format!("server {}", pid()));
    terminal.press(&["q"]);
    terminal.is_given_back(&settings, "after");
}

#[test]
fn top_restores_the_terminal_and_waits_for_servers() {
    let (mut served, _) = server("");
    let terminal = Terminal::start(80, 24, &["TERM=vt100", "LANG=C", "LC_ALL=C", "NO_COLOR=1"]);
    let settings = terminal.settings("before");
    terminal.run("echo 'somebody was''-here'");
    terminal.wait_for("was-here");
    let pid = terminal.dir.path().join("pid");
    let command = format!(
        "sh -c 'echo $$ > {}; exec {}'; echo status $?",
        pid.display(),
        top(&served)
    );
    terminal.run(&command);
    let screen = terminal.wait_for("idle");
    terminal.press(&["Enter"]);
    let more = terminal.wait_for("no request was completed");
    for screen in [&screen, &more] {
        assert!(screen.is_ascii(), "{screen}");
    }
    let with_codes = terminal.tmux(&["capture-pane", "-p", "-e"]).stdout;
    let with_codes = String::from_utf8(with_codes).unwrap();
    for colour in ["[3", "[4", "[9"] {
        let coloured = with_codes.split('\x1b').skip(1).any(|code| {
            code.starts_with(colour) && !["[39m", "[49m"].iter().any(|none| code.starts_with(none))
        });
        assert!(!coloured, "{with_codes:?}");
    }
    // The server ends, and `fathom top` waits for another one.
    terminal.press(&["Escape"]);
    served.terminate();
    terminal.wait_for("waiting for a server");
    let pid = fs::read_to_string(pid).unwrap();
    assert!(
        Command::new("kill")
            .args(["-TERM", pid.trim()])
            .status()
            .unwrap()
            .success()
    );
    terminal.wait_for("status 143");
    terminal.is_given_back(&settings, "after");
}

#[test]
fn who_closes_the_terminal_ends_it() {
    let (served, _) = server("");
    let terminal = Terminal::start(80, 24, &[]);
    let pid = terminal.dir.path().join("pid");
    let command = format!("sh -c 'echo $$ > {}; exec {}'", pid.display(), top(&served));
    terminal.run(&command);
    terminal.wait_for("idle");
    let pid = fs::read_to_string(pid).unwrap();
    terminal.tmux(&["kill-server"]);
    let process = format!("/proc/{}", pid.trim());
    eventually("it ends", || (!Path::new(&process).exists()).then_some(()));
}
