//! Attempts of an attacker in control of a thread, for each kind of process and thread.
//!
//! Each attempt runs in a sandboxed child process, an instance of this program. The parent observes
//! the outcome.

mod attempts;

use attempts::{ATTEMPTS, Attempt, Outcome};
use fathom_sandbox::{Allowed, Kind, Mode, PathAccess, Tenant, cage_server, enter, report};
use std::collections::BTreeMap;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

const NOBODY: u32 = 65534;

fn is_root() -> bool {
    // SAFETY: the call uses no memory.
    unsafe { libc::geteuid() == 0 }
}

/// Files and sockets outside of the sandbox that an attack could reach.
struct Surroundings {
    dir: tempfile::TempDir,
    _tcp: TcpListener,
    _unix: UnixListener,
    port: u16,
}

impl Surroundings {
    fn new() -> Surroundings {
        let dir = tempfile::tempdir().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        std::fs::write(dir.path().join("neighbour.img"), [0; 512]).unwrap();
        std::fs::create_dir(dir.path().join("mine")).unwrap();
        std::fs::write(dir.path().join("mine/disk.img"), [0; 512]).unwrap();
        let open_to_all = |path: &Path, mode| {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        // Permissions are open to all, so that only the sandbox can refuse an attempt.
        for (name, mode) in [
            ("", 0o777),
            ("mine", 0o777),
            ("neighbour.img", 0o666),
            ("mine/disk.img", 0o666),
        ] {
            open_to_all(&dir.path().join(name), mode);
        }
        let unix = UnixListener::bind(dir.path().join("socket")).unwrap();
        open_to_all(&dir.path().join("socket"), 0o777);
        Surroundings {
            _unix: unix,
            port: tcp.local_addr().unwrap().port(),
            _tcp: tcp,
            dir,
        }
    }

    /// Runs this program as a sandboxed process, whose thread of this kind makes all attempts from
    /// `first` on.
    fn attack(&self, process: &str, kind: Kind, first: usize) -> (String, Option<i32>) {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "inside", "--ignored", "--nocapture", "-q"]);
        child.env("CAGE_PROCESS", process);
        child.env("CAGE_KIND", format!("{kind:?}"));
        child.env("CAGE_FIRST", first.to_string());
        child.env("CAGE_DIR", self.dir.path());
        child.env("CAGE_PORT", self.port.to_string());
        child.stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = child.spawn().unwrap();
        let mut said = String::new();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_to_string(&mut said).unwrap();
        (said, child.wait().unwrap().signal())
    }

    /// Returns the outcome of each attempt.
    fn outcomes(&self, process: &str, kind: Kind) -> BTreeMap<&'static str, Outcome> {
        let mut outcomes = BTreeMap::new();
        while outcomes.len() < ATTEMPTS.len() {
            let first = outcomes.len();
            let (said, signal) = self.attack(process, kind, first);
            assert!(said.contains("= ready\n"), "{process} {kind:?}: {said}");
            let said = said.replace("= ready\n", "");
            let lines = said.lines().filter_map(|line| line.strip_prefix("= "));
            for (line, attempt) in lines.zip(&ATTEMPTS[first..]) {
                outcomes.insert(attempt.name, Outcome::read(line));
            }
            // An attempt that ends the process prints no outcome.
            if let Some(attempt) = ATTEMPTS.get(outcomes.len()) {
                let what = match signal {
                    Some(libc::SIGSYS) => Outcome::Killed,
                    None if said.ends_with("another program\n") => Outcome::Happened,
                    other => panic!("{process} {kind:?} {}: {other:?}: {said}", attempt.name),
                };
                outcomes.insert(attempt.name, what);
            }
        }
        outcomes
    }
}

/// Names of the attempts that succeed in a thread, with the reason why they are accepted.
fn still_possible(process: &str, kind: Kind) -> &'static [&'static str] {
    // A worker can create a socket through its existing io_uring instance, but connect it to
    // nothing. In production such instances are restricted, see fathom-storage.
    match (process, kind) {
        // A server in one process opens files that the API names, connects to NBD servers and binds
        // sockets.
        ("server", Kind::Control) => &[
            "open shadow",
            "open a neighbour's image",
            "create a file",
            "open another's memory",
            "connect by TCP",
            "bind a TCP port",
            "make a UDP socket",
            "connect to a Unix socket",
            "make a ring",
            "open shadow by a ring",
            "make a socket by a ring",
            "become another program",
            "regain capabilities",
        ],
        ("server", Kind::General) => &[
            "open shadow",
            "open a neighbour's image",
            "create a file",
            "open another's memory",
            "connect by TCP",
            "bind a TCP port",
            "make a UDP socket",
            "connect to a Unix socket",
            "make a ring",
            "open shadow by a ring",
            "make a socket by a ring",
            "regain capabilities",
        ],
        // These threads reopen the image, search for the holder of a lock, and remove their
        // sockets.
        ("server", Kind::Session | Kind::NbdListener | Kind::NbdConnection | Kind::Fuse) => &[
            "open shadow",
            "open a neighbour's image",
            "open another's memory",
            "regain capabilities",
        ],
        ("tenant", Kind::Control) => &["make a ring", "make a socket by a ring"],
        (_, Kind::Worker) => &["make a socket by a ring"],
        _ => &[],
    }
}

fn check(process: &str, kind: Kind) {
    let surroundings = Surroundings::new();
    let outcomes = surroundings.outcomes(process, kind);
    let happened = |(name, outcome): (&&'static str, &Outcome)| {
        matches!(outcome, Outcome::Happened).then_some(*name)
    };
    let mut happened: Vec<_> = outcomes.iter().filter_map(happened).collect();
    let mut expected = still_possible(process, kind).to_vec();
    if !is_root() {
        let of_root = [
            "open shadow",
            "open shadow by a ring",
            "regain capabilities",
        ];
        expected.retain(|name| !of_root.contains(name));
        happened.retain(|name| !of_root.contains(name));
    }
    happened.sort();
    expected.sort();
    assert_eq!(happened, expected, "{process} {kind:?}: {outcomes:#?}");
    for Attempt { name, ends, .. } in &ATTEMPTS {
        let outcome = &outcomes[name];
        assert!(
            !ends || matches!(outcome, Outcome::Killed),
            "{process} {kind:?} {name}: {outcome:?}"
        );
    }
}

#[test]
fn a_tenants_threads_reach_nothing() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::General) {
        check("tenant", kind);
    }
}

#[test]
fn a_servers_threads_reach_what_they_need() {
    for kind in Kind::ALL {
        check("server", kind);
    }
}

/// Shows that the attempts succeed without a sandbox; otherwise the other tests would prove
/// nothing.
#[test]
fn without_a_cage_the_attempts_succeed() {
    let surroundings = Surroundings::new();
    let outcomes = surroundings.outcomes("off", Kind::Worker);
    for Attempt { name, works, .. } in &ATTEMPTS {
        let of_root = [
            "open shadow",
            "open shadow by a ring",
            "regain capabilities",
        ];
        if *works && (is_root() || !of_root.contains(name)) {
            assert_eq!(outcomes[name], Outcome::Happened, "{name}");
        }
    }
}

/// Attempts fail because of the tenant's user alone, without a sandbox.
#[test]
fn a_tenants_user_has_nothing_of_others() {
    assert!(
        is_root(),
        "only root can become another user: run it as root"
    );
    let surroundings = Surroundings::new();
    // Images usually have these permissions.
    let image = surroundings.dir.path().join("neighbour.img");
    let secret = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(image, secret).unwrap();
    let outcomes = surroundings.outcomes("user", Kind::Worker);
    for name in [
        "open shadow",
        "open shadow by a ring",
        "open a neighbour's image",
        "open another's memory",
        "trace",
        "signal another process",
        "regain capabilities",
        "become root",
        "become root for good",
        "join a group",
        "mount",
        "change the root",
        "open by handle",
    ] {
        let outcome = outcomes[name];
        assert!(
            matches!(outcome, Outcome::Refused(_)),
            "{name}: {outcome:?}"
        );
    }
    assert_eq!(outcomes["connect by TCP"], Outcome::Happened);
}

/// In mode `log`, no attempt is refused or ends the process.
#[test]
fn a_log_changes_nothing() {
    let surroundings = Surroundings::new();
    let outcomes = surroundings.outcomes("log", Kind::Worker);
    for Attempt { name, works, .. } in &ATTEMPTS {
        assert_ne!(outcomes[name], Outcome::Killed, "{name}");
        if *works && is_root() && *name != "regain capabilities" {
            assert_eq!(outcomes[name], Outcome::Happened, "{name}");
        }
    }
}

/// Body of the sandboxed child process that the other tests start.
#[test]
#[ignore = "it is the inside of the others"]
fn inside() {
    let Ok(process) = std::env::var("CAGE_PROCESS") else {
        return;
    };
    let wanted = std::env::var("CAGE_KIND").unwrap();
    let first: usize = std::env::var("CAGE_FIRST").unwrap().parse().unwrap();
    let kind = Kind::ALL.into_iter().find(|k| format!("{k:?}") == wanted);
    let place = attempts::Place::from_environment();
    match &*process {
        "off" => {}
        "log" => drop(cage_server(Mode::Log)),
        "user" => {
            let tenant = Tenant {
                mode: Mode::Off,
                user: Some((NOBODY, NOBODY)),
                ..Tenant::default()
            };
            tenant.lock_up().unwrap();
        }
        "server" => assert_all_in_force(&cage_server(Mode::On)),
        _ => lock_up_tenant(&place.dir),
    }
    let body = move || {
        // Like a worker, the thread creates its io_uring instance before it enters the sandbox.
        let mut place = place.with_ring();
        enter(kind.unwrap());
        say("= ready\n");
        for attempt in &ATTEMPTS[first..] {
            let outcome = (attempt.make)(&mut place);
            say(&format!("= {}\n", outcome.written()));
        }
    };
    std::thread::spawn(body).join().unwrap();
    let parts = report().map(|report| report.parts).unwrap_or_default();
    assert!(
        parts
            .iter()
            .all(|part| part.name != "system calls of threads" || part.in_force)
    );
    // SAFETY: the call uses no memory.
    unsafe { libc::_exit(0) };
}

fn lock_up_tenant(dir: &Path) {
    let mine = std::fs::File::open(dir.join("mine")).unwrap();
    let tenant = Tenant {
        mode: Mode::On,
        user: is_root().then_some((NOBODY, NOBODY)),
        allowed: vec![Allowed {
            at: mine.into(),
            access: PathAccess::Write,
        }],
        ..Tenant::default()
    };
    assert_all_in_force(&tenant.lock_up().unwrap());
    let image = dir.join("mine/disk.img");
    std::fs::File::options()
        .read(true)
        .write(true)
        .open(image)
        .expect("its own");
}

fn assert_all_in_force(report: &fathom_sandbox::Report) {
    let missing: Vec<_> = report.parts.iter().filter(|part| !part.in_force).collect();
    assert!(missing.is_empty() || !is_root(), "{missing:#?}");
}

fn say(line: &str) {
    // SAFETY: the call reads `line`.
    unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
}
