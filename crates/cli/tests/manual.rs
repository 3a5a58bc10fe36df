//! Tests the manual pages with groff, and the completions with bash.

use std::collections::BTreeSet;
use std::process::Command;

fn fathom() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fathom"))
}

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_command_has_a_page_that_groff_has_nothing_to_say_of() {
    let dir = tempfile::tempdir().unwrap();
    said(fathom().arg("man").arg(dir.path()));
    let pages = std::fs::read_dir(dir.path()).unwrap();
    let pages: Vec<_> = pages.map(|page| page.unwrap().path()).collect();
    for name in [
        "fathom",
        "fathom-serve",
        "fathom-disk-add",
        "fathom-lab-run-wiki",
    ] {
        let page = dir.path().join(format!("{name}.1"));
        assert!(pages.contains(&page), "no {name} in {pages:?}");
    }
    let hidden = |name| pages.iter().any(|page| page.ends_with(name));
    assert!(!hidden("fathom-tenant.1") && !hidden("fathom-starter.1"));

    // A word that is wider than a line is not an error.
    let mut groff = Command::new("groff");
    said(
        groff
            .args(["-man", "-ww", "-Wbreak", "-z", "-Tutf8", "-Kutf8"])
            .args(&pages),
    );
    let text = said(
        Command::new("groff")
            .args(["-man", "-Tascii", "-P-cbou"])
            .arg(dir.path().join("fathom-serve.1")),
    );
    assert!(text.contains("--vhost-user"), "{text}");
}

#[test]
fn page_of_one_command_is_printed() {
    let page = said(fathom().args(["man", "disk", "add"]));
    assert!(
        page.contains("FATHOM\\-DISK\\-ADD") || page.contains("FATHOM-DISK-ADD"),
        "{page}"
    );
    assert_eq!(page, said(fathom().args(["man", "fathom-disk-add"])));
    let output = fathom().args(["man", "moon"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.contains("neither a command nor a directory"),
        "{error}"
    );
}

#[test]
fn every_page_has_examples_exit_status_files_and_related_pages() {
    let dir = tempfile::tempdir().unwrap();
    said(fathom().arg("man").arg(dir.path()));
    let pages = std::fs::read_dir(dir.path()).unwrap();
    for path in pages.map(|page| page.unwrap().path()) {
        let page = std::fs::read_to_string(&path).unwrap();
        for heading in ["OPTIONS", "EXAMPLES", "EXIT STATUS", "FILES", "SEE ALSO"] {
            let is_heading = |line: &str| {
                line.strip_prefix(".SH ")
                    .is_some_and(|name| name.trim_matches('"') == heading)
            };
            assert!(
                page.lines().any(is_heading),
                "{}: no {heading}",
                path.display()
            );
        }
    }
}

#[test]
fn pages_of_formats_are_made_that_groff_has_nothing_to_say_of() {
    let dir = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/pages.sh");
    said(Command::new("sh").arg(script).arg(dir.path()).arg("1.0"));
    for name in ["fathom.toml.5", "fathom-run.5"] {
        let page = dir.path().join(name);
        let mut groff = Command::new("groff");
        said(
            groff
                .args(["-t", "-man", "-ww", "-Wbreak", "-z", "-Tutf8", "-Kutf8"])
                .arg(&page),
        );
        let what = said(Command::new("lexgrog").arg(&page));
        assert!(what.contains(name.trim_end_matches(".5")), "{what}");
    }
}

#[test]
fn the_page_on_json_has_all_commands_that_print_it() {
    let page = include_str!("../../../docs/json.md");
    let rows = page.lines().filter(|line| line.starts_with("| `fathom"));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let told = cells.flat_map(|cell| cell.split('`').filter(|words| words.starts_with("fathom")));
    let told: BTreeSet<_> = told.map(str::to_owned).collect();

    let dir = tempfile::tempdir().unwrap();
    said(fathom().arg("man").arg(dir.path()));
    let pages = std::fs::read_dir(dir.path()).unwrap();
    let pages = pages.map(|page| page.unwrap().file_name().into_string().unwrap());
    let commands = pages.map(|page| page.trim_end_matches(".1").replace('-', " "));
    let print_it = commands.filter(|command| {
        let help = said(fathom().args(command.split(' ').skip(1)).arg("--help"));
        let mut lines = help.lines().map(str::trim_start);
        lines.any(|line| line.starts_with("--json"))
    });
    // The commands for images print JSON like qemu-img. All experiments print the same JSON.
    let of_their_own = print_it
        .filter(|command| !command.starts_with("fathom img "))
        .filter(|command| !command.starts_with("fathom lab run "));
    let there: BTreeSet<_> = of_their_own.collect();
    let told: BTreeSet<_> = { told.into_iter() }
        .filter(|command| !command.starts_with("fathom img"))
        .collect();
    assert_eq!(told, there);
}

/// Asks the program which keys each table has.
#[test]
fn the_configurations_page_has_all_keys() {
    let page = include_str!("../../../docs/configuration.md");
    let tables = [
        ("The server", "x = 1"),
        ("The server", "api = { x = 1 }"),
        ("Disks", "[[disk]]\nx = 1"),
        ("NBD clients", "[nbd]\nx = 1"),
        ("Threads", "[pool.a]\nx = 1"),
        ("Processes", "[tenants]\nx = 1"),
        ("Processes", "tenants = true\n[tenant.a]\nx = 1"),
    ];
    for (heading, table) in tables {
        let mut sections = page.split("\n## ");
        let section = sections.find(|section| section.starts_with(heading));
        let section = section.unwrap_or_else(|| panic!("no section '{heading}'"));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("fathom.toml");
        std::fs::write(&file, table).unwrap();
        let mut serve = fathom();
        let output = serve.args(["serve", "--config"]).arg(file).output();
        let error = String::from_utf8(output.unwrap().stderr).unwrap();
        let (_, keys) = error
            .split_once("known are ")
            .unwrap_or_else(|| panic!("{error}"));
        for key in keys.trim().split(", ") {
            assert!(section.contains(key), "{key} is not in '{heading}'");
        }
    }
}

#[test]
fn bash_completes_commands_options_values_and_served_disks() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("fathom.bash");
    std::fs::write(&script, said(fathom().args(["completions", "bash"]))).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_fathom"), dir.path().join("fathom")).unwrap();
    let path = format!(
        "{}:{}",
        dir.path().display(),
        std::env::var("PATH").unwrap()
    );
    let command = |words: &str, last: usize| {
        format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={last}; \
             _clap_complete_fathom fathom \"${{COMP_WORDS[{last}]}}\" x; echo \"${{COMPREPLY[*]}}\"",
            script.display()
        )
    };
    let completed = |words: &str, last: usize| {
        let ask = command(words, last);
        said(
            Command::new("bash")
                .env("PATH", &path)
                .args(["--norc", "-c", &ask]),
        )
    };
    assert_eq!(completed("fathom se", 1), "serve set\n");
    assert_eq!(completed("fathom serve --vhost", 2), "--vhost-user\n");
    assert_eq!(completed("fathom img con", 2), "convert\n");
    assert_eq!(completed("fathom serve x --cache writeb", 4), "writeback\n");
    assert_eq!(completed("fathom serve x --format qc", 4), "qcow2\n");
    assert_eq!(completed("fathom serve x --filter thr", 4), "throttle\n");
    let image = format!("{}/fathom.b", dir.path().display());
    let found = completed(&format!("fathom serve {image}"), 2);
    assert_eq!(found, format!("{image}ash\n"));
    // A disk is offered as a completion while it is served.
    let ask = dir.path().join("ask");
    std::fs::write(&ask, command("fathom show memory:7", 2)).unwrap();
    let run = format!("bash --norc {}", ask.display());
    let mut serve = fathom();
    let output = serve
        .args(["serve", "memory:777k", "--run", &run])
        .env("PATH", &path)
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "memory:795648\n",
        "{output:?}"
    );
    assert_eq!(completed("fathom show memory:7", 2), "\n");
}

#[test]
fn a_directory_that_is_not_there_is_said() {
    let output = fathom().args(["man", "/nonexistent"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.contains("cannot write /nonexistent/fathom.1"),
        "{error}"
    );
}
