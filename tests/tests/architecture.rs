//! Checks rules about the code that readers rely on and the compiler does not check.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The dependency rule: a crate may use the crates below it, and siblings never use each other.
/// `bench`, `lab` and the tests are outside the data plane and use it only as users do.
const MAY_USE: &[(&str, &[&str])] = &[
    ("fathom-units", &[]),
    ("fathom-sigbus", &[]),
    ("fathom-testing", &[]),
    ("fathom-sockets", &["fathom-units"]),
    ("fathom-tls", &["fathom-units"]),
    ("fathom-nbd", &["fathom-tls", "fathom-units"]),
    ("fathom-files", &["fathom-units"]),
    ("fathom-sandbox", &[]),
    ("fathom-trace", &["fathom-sigbus", "fathom-units"]),
    ("fathom-core", &["fathom-trace", "fathom-units"]),
    (
        "fathom-storage",
        &[
            "fathom-core",
            "fathom-trace",
            "fathom-nbd",
            "fathom-tls",
            "fathom-files",
            "fathom-sigbus",
            "fathom-units",
        ],
    ),
    ("fathom-luks", &["fathom-units"]),
    ("fathom-foreign", &["fathom-units"]),
    (
        "fathom-formats",
        &[
            "fathom-core",
            "fathom-trace",
            "fathom-files",
            "fathom-luks",
            "fathom-foreign",
            "fathom-units",
        ],
    ),
    (
        "fathom-filters",
        &[
            "fathom-core",
            "fathom-files",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    ("fathom-virtio", &["fathom-core", "fathom-trace"]),
    (
        "fathom-exports",
        &[
            "fathom-sockets",
            "fathom-virtio",
            "fathom-core",
            "fathom-trace",
            "fathom-nbd",
            "fathom-tls",
            "fathom-sigbus",
            "fathom-units",
        ],
    ),
    (
        "fathom-stack",
        &[
            "fathom-filters",
            "fathom-formats",
            "fathom-luks",
            "fathom-storage",
            "fathom-core",
            "fathom-trace",
            "fathom-files",
            "fathom-units",
            "fathom-sigbus",
        ],
    ),
    (
        "fathom-spec",
        &[
            "fathom-stack",
            "fathom-filters",
            "fathom-formats",
            "fathom-storage",
            "fathom-core",
            "fathom-trace",
            "fathom-files",
            "fathom-units",
        ],
    ),
    (
        "fathom-jobs",
        &[
            "fathom-stack",
            "fathom-formats",
            "fathom-storage",
            "fathom-core",
            "fathom-files",
            "fathom-nbd",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    ("fathom-archive", &["fathom-units"]),
    (
        "fathom-base",
        &[
            "fathom-archive",
            "fathom-sandbox",
            "fathom-stack",
            "fathom-storage",
            "fathom-core",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    (
        "fathom-client",
        &["fathom-sockets", "fathom-tls", "fathom-units"],
    ),
    (
        "fathom-control",
        &[
            "fathom-spec",
            "fathom-stack",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    (
        "fathom-metrics",
        &[
            "fathom-control",
            "fathom-jobs",
            "fathom-limiter",
            "fathom-run",
            "fathom-sandbox",
            "fathom-spec",
            "fathom-stack",
            "fathom-formats",
            "fathom-core",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    (
        "fathom-requests",
        &[
            "fathom-control",
            "fathom-formats",
            "fathom-metrics",
            "fathom-spec",
            "fathom-stack",
            "fathom-storage",
            "fathom-trace",
        ],
    ),
    (
        "fathom-api",
        &[
            "fathom-trace",
            "fathom-client",
            "fathom-control",
            "fathom-core",
            "fathom-metrics",
            "fathom-requests",
            "fathom-sockets",
            "fathom-spec",
            "fathom-tls",
            "fathom-units",
        ],
    ),
    (
        "fathom-host",
        &[
            "fathom-api",
            "fathom-control",
            "fathom-core",
            "fathom-exports",
            "fathom-files",
            "fathom-jobs",
            "fathom-metrics",
            "fathom-nbd",
            "fathom-requests",
            "fathom-sandbox",
            "fathom-sockets",
            "fathom-spec",
            "fathom-stack",
            "fathom-storage",
            "fathom-tls",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    (
        "fathom-disks",
        &[
            "fathom-control",
            "fathom-core",
            "fathom-exports",
            "fathom-files",
            "fathom-filters",
            "fathom-formats",
            "fathom-jobs",
            "fathom-metrics",
            "fathom-requests",
            "fathom-sandbox",
            "fathom-sockets",
            "fathom-spec",
            "fathom-stack",
            "fathom-storage",
            "fathom-tls",
            "fathom-trace",
            "fathom-units",
            "fathom-host",
        ],
    ),
    (
        "fathom-supervisor",
        &[
            "fathom-control",
            "fathom-core",
            "fathom-exports",
            "fathom-files",
            "fathom-filters",
            "fathom-metrics",
            "fathom-nbd",
            "fathom-requests",
            "fathom-sandbox",
            "fathom-sockets",
            "fathom-spec",
            "fathom-stack",
            "fathom-storage",
            "fathom-trace",
            "fathom-units",
            "fathom-host",
        ],
    ),
    (
        "fathom-daemon",
        &[
            "fathom-nbd",
            "fathom-api",
            "fathom-disks",
            "fathom-host",
            "fathom-supervisor",
            "fathom-control",
            "fathom-sockets",
            "fathom-units",
            "fathom-exports",
            "fathom-files",
            "fathom-sandbox",
            "fathom-formats",
            "fathom-storage",
            "fathom-stack",
            "fathom-spec",
            "fathom-metrics",
            "fathom-requests",
            "fathom-core",
            "fathom-trace",
        ],
    ),
    (
        "fathom-img",
        &[
            "fathom-archive",
            "fathom-files",
            "fathom-stack",
            "fathom-formats",
            "fathom-luks",
            "fathom-storage",
            "fathom-core",
            "fathom-trace",
            "fathom-nbd",
            "fathom-units",
        ],
    ),
    (
        "fathom-load",
        &["fathom-nbd", "fathom-files", "fathom-trace", "fathom-units"],
    ),
    ("fathom-run", &["fathom-units"]),
    ("fathom-limiter", &["fathom-run"]),
    ("fathom-advise", &["fathom-units"]),
    (
        "fathom-lab",
        &[
            "fathom-client",
            "fathom-nbd",
            "fathom-load",
            "fathom-limiter",
            "fathom-run",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    (
        "fathom-report",
        &[
            "fathom-limiter",
            "fathom-run",
            "fathom-trace",
            "fathom-units",
        ],
    ),
    (
        "fathom-cli",
        &[
            "fathom-host",
            "fathom-api",
            "fathom-requests",
            "fathom-sockets",
            "fathom-control",
            "fathom-spec",
            "fathom-archive",
            "fathom-base",
            "fathom-client",
            "fathom-sandbox",
            "fathom-daemon",
            "fathom-metrics",
            "fathom-img",
            "fathom-stack",
            "fathom-exports",
            "fathom-filters",
            "fathom-formats",
            "fathom-storage",
            "fathom-nbd",
            "fathom-tls",
            "fathom-load",
            "fathom-advise",
            "fathom-lab",
            "fathom-report",
            "fathom-run",
            "fathom-core",
            "fathom-trace",
            "fathom-files",
            "fathom-units",
        ],
    ),
    (
        "fathom-tests",
        &[
            "fathom-testing",
            "fathom-nbd",
            "fathom-load",
            "fathom-lab",
            "fathom-limiter",
            "fathom-report",
            "fathom-run",
        ],
    ),
    (
        "fathom-fuzz",
        &[
            "fathom-archive",
            "fathom-core",
            "fathom-formats",
            "fathom-foreign",
            "fathom-luks",
            "fathom-storage",
            "fathom-virtio",
            "fathom-exports",
            "fathom-trace",
            "fathom-nbd",
        ],
    ),
];

const LINES: usize = 600;
/// Source files that may be longer, each with its reason.
const LONGER: &[(&str, &str)] = &[];

/// Paths of a developer's machine, which must not be in the repository.
const HOST_PATHS: &[&str] = &["/home/", "/root/", "/Users/"];

fn root() -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    dir.parent().expect("tests/ has a parent").to_owned()
}

/// Returns every file of the repository, without generated ones.
fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![root()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() {
                let generated = ["target", ".git", "corpus", "artifacts"].contains(&name.as_str());
                if !generated {
                    dirs.push(path);
                }
            } else {
                found.push(path);
            }
        }
    }
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

/// The crate that tests of any crate may use.
const FOR_TESTS: (&str, &str) = ("dev-dependencies", "fathom-testing");

/// Returns from a Cargo.toml the crate's name and the names of the workspace crates that it uses.
///
/// Dev-dependencies count too, since a test that needs a sibling is a sign of a missing seam.
fn read_manifest(text: &str) -> (String, Vec<String>) {
    let mut name = String::new();
    let mut uses = Vec::new();
    let mut section = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']').to_owned();
            // [dependencies.fathom-core]
            if let Some((table, dependency)) = section.split_once('.')
                && table.ends_with("dependencies")
            {
                uses.push(dependency.to_owned());
            }
        } else if let Some((key, value)) = line.split_once('=') {
            let key = key.trim().split('.').next().unwrap_or_default();
            if section == "package" && key == "name" {
                name = value.trim().trim_matches('"').to_owned();
            } else if section.ends_with("dependencies") && (section.as_str(), key) != FOR_TESTS {
                uses.push(key.to_owned());
            }
        }
    }
    uses.retain(|dependency| dependency.starts_with("fathom-"));
    (name, uses)
}

#[test]
fn dependencies_point_down_only() {
    let allowed: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    let mut crates = 0;
    for path in files().iter().filter(|path| path.ends_with("Cargo.toml")) {
        let (name, uses) = read_manifest(&fs::read_to_string(path).unwrap());
        if name.is_empty() {
            continue; // the workspace itself
        }
        crates += 1;
        let Some(allowed) = allowed.get(name.as_str()) else {
            panic!("{}: {name} has no line in the dependency rule", shown(path));
        };
        // A crate may enable its own features for its tests.
        for used in uses.into_iter().filter(|used| *used != name) {
            assert!(
                allowed.contains(&used.as_str()),
                "{}: {name} must not use {used}",
                shown(path)
            );
        }
    }
    assert!(
        crates >= 10,
        "only {crates} crates found: is the test looking in the right place?"
    );
}

/// Users of a crate that re-exports names of another crate must be allowed to use that, too.
#[test]
fn names_of_other_crates_are_no_way_around() {
    let mut shown_names = 0;
    for path in files().iter().filter(|path| shown(path).contains("/src/")) {
        let name = shown(path);
        let Some(of) = name
            .strip_prefix("crates/")
            .filter(|_| name.ends_with(".rs"))
        else {
            continue;
        };
        let of = format!("fathom-{}", of.split('/').next().unwrap_or_default());
        let text = fs::read_to_string(path).unwrap();
        let shows = text
            .lines()
            .filter_map(|line| line.strip_prefix("pub use fathom_"));
        for other in shows.filter_map(|rest| rest.split("::").next()) {
            let other = format!("fathom-{other}");
            shown_names += 1;
            for (user, may) in MAY_USE.iter().filter(|(_, may)| may.contains(&&*of)) {
                assert!(
                    may.contains(&&*other),
                    "{name}: {user} gets names of {other}, which it must not use"
                );
            }
        }
    }
    assert!(shown_names > 0, "is the test looking in the right place?");
}

#[test]
fn manifests_of_both_spellings_are_understood() {
    let text = "[package]\nname = \"fathom-x\"\n[dependencies]\nfathom-core.workspace = true\n\
                libc = \"1\"\n[dev-dependencies]\nfathom-lab = { path = \"../lab\" }\n\
                [dependencies.fathom-trace]\nworkspace = true\n";
    let (name, uses) = read_manifest(text);
    assert_eq!(name, "fathom-x");
    assert_eq!(uses, ["fathom-core", "fathom-lab", "fathom-trace"]);
}

/// A feature that only tests and fuzz targets enable has test disks and bodies of fuzz targets.
#[test]
fn what_only_tests_need_is_not_released() {
    for path in files() {
        let name = shown(&path);
        if !name.contains("/src/") || name.contains("/testing/") || !name.ends_with(".rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for (before, line) in text.lines().zip(text.lines().skip(1)) {
            let is_module = line.ends_with("mod fuzz;") || line.ends_with("mod testing;");
            assert!(
                !is_module || before.contains("feature = \"testing\""),
                "{name}: `{line}` is always compiled"
            );
        }
    }
    // The features of the program that `make build` builds.
    let mut tree = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    tree.current_dir(root()).args(["tree", "--frozen"]);
    tree.args(["--package=fathom-cli", "--edges=no-dev"]);
    tree.args(["--prefix=none", "--format={p}|{f}"]);
    let output = tree.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let tree = String::from_utf8(output.stdout).unwrap();
    assert!(tree.contains("fathom-exports v"), "{tree}");
    for line in tree.lines() {
        let (package, features) = line.split_once('|').unwrap();
        let for_tests = |feature: &str| feature.starts_with("testing");
        assert!(
            !features.split([',', ' ']).any(for_tests),
            "{package} is built with {features}"
        );
    }
}

#[test]
fn source_files_are_short_enough_to_read() {
    let mut sources = 0;
    for path in files()
        .iter()
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
    {
        sources += 1;
        let lines = fs::read_to_string(path).unwrap().lines().count();
        let name = shown(path);
        let excused = LONGER.iter().any(|(file, _)| *file == name);
        assert!(
            lines <= LINES || excused,
            "{name} has {lines} lines; the limit is {LINES}"
        );
        assert!(
            lines > LINES || !excused,
            "{name} needs no exception any more"
        );
    }
    assert!(sources > 30, "only {sources} sources found");
}

#[test]
fn nothing_names_a_path_of_somebodys_machine() {
    let text_kinds = ["rs", "toml", "md", "sh", "S", "py", "yml", "yaml", ""];
    for path in files() {
        let extension = path
            .extension()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let is_this_test = path.ends_with("tests/tests/architecture.rs");
        if is_this_test || !text_kinds.contains(&extension.as_str()) {
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            for host in HOST_PATHS {
                assert!(
                    !line.contains(host),
                    "{}:{}: {host}",
                    shown(&path),
                    number + 1
                );
            }
        }
    }
}
