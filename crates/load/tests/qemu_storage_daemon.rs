//! Tests of the load generator against qemu-storage-daemon, with verification. The two programs
//! share no code, so they do not share mistakes.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::time::Duration;

use fathom_load::{File, Load, Options, Report, Rw, Target, VhostUser, Wait};
use fathom_testing::until;

const LEN: u64 = 32 << 20;

/// A running qemu-storage-daemon that exports a raw file.
struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let (image, socket) = (dir.path().join("image"), dir.path().join("sock"));
        std::fs::File::create(&image).unwrap().set_len(LEN).unwrap();
        let blockdev = format!(
            "driver=file,node-name=n,filename={},discard=unmap",
            image.display()
        );
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={},\
             num-queues=2,writable=on",
            socket.display()
        );
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &blockdev, "--export", &export])
            .spawn()
            .expect("qemu-storage-daemon is needed; `make setup` installs it");
        let daemon = Daemon { child, dir };
        wait_for(&daemon.socket());
        daemon
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("sock")
    }

    fn run(&self, load: Load, change: impl FnOnce(&mut VhostUser)) -> Report {
        let mut server = VhostUser::new(self.socket());
        change(&mut server);
        let options = Options {
            target: Target::VhostUser(server),
            load,
        };
        fathom_load::run(&options, &mut |_| {}).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the socket accepts connections, according to the kernel's table. The file exists
/// before that, and a test connection would count as a front-end.
fn wait_for(path: &Path) {
    const ACCEPTCON: &str = "00010000"; // proc_net_unix(5): __SO_ACCEPTCON
    let is_this = |line: &str| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(ACCEPTCON) && fields.next_back() == path.to_str()
    };
    until(&format!("the socket {}", path.display()), || {
        let table = std::fs::read_to_string("/proc/net/unix").expect("the kernel's table");
        table.lines().any(is_this)
    });
}

fn mixed() -> Load {
    Load {
        rw: Rw::RandRw,
        iodepth: 16,
        runtime: None,
        ramp: Duration::ZERO,
        number_ios: Some(4000),
        verify: true,
        ..Load::default()
    }
}

#[test]
fn every_kind_of_ring_verifies() {
    let daemon = Daemon::start();
    for (indirect, event_idx, wait, log) in [
        (true, true, Wait::Interrupt, false),
        (false, false, Wait::Interrupt, false),
        (true, true, Wait::Poll, true),
        (true, false, Wait::Interrupt, true),
    ] {
        let load = Load {
            rwmixtrim: 5,
            rwmixzero: 5,
            fsync: 20,
            ..mixed()
        };
        let report = daemon.run(load, |s| {
            s.indirect = indirect;
            s.event_idx = event_idx;
            s.wait = wait;
            s.log = log;
        });
        assert!(report.verify.unwrap().checked > 1000, "{report}");
        assert_eq!(report.dirty_log_pages.is_some(), log);
    }
}

#[test]
fn what_goes_in_by_the_ring_is_in_the_file() {
    let daemon = Daemon::start();
    let state = daemon.dir.path().join("state");
    let load = Load {
        rw: Rw::Write,
        queues: 2,
        verify_state: Some(state.clone()),
        ..mixed()
    };
    let written = daemon.run(load.clone(), |_| {}).verify.unwrap();
    assert_eq!(written.written, 8000);
    let options = Options {
        target: Target::File(File {
            buffered: true,
            ..File::new(daemon.dir.path().join("image"))
        }),
        load: Load {
            verify_only: true,
            queues: 1,
            ..load
        },
    };
    let read = fathom_load::run(&options, &mut |_| {}).unwrap();
    assert_eq!(read.verify.unwrap().checked, 8000);
}

#[test]
fn a_server_that_is_killed_is_missed() {
    let mut daemon = Daemon::start();
    let socket = daemon.socket();
    let load = Load {
        number_ios: Some(u64::MAX),
        verify: false,
        ..mixed()
    };
    let (sender, answers) = channel();
    let run = std::thread::spawn(move || {
        let options = Options {
            target: Target::VhostUser(VhostUser::new(socket)),
            load,
        };
        fathom_load::run(&options, &mut |progress| {
            if progress.completed > 0 {
                let _ = sender.send(());
            }
        })
    });
    answers.recv().expect("it is answered");
    daemon.child.kill().unwrap();
    let error = run.join().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("the server closed the connection after"),
        "{error}"
    );
}
