//! A Ceph cluster on this machine: a monitor, a manager, and OSDs that store objects in memory.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_lab::Process;
use fathom_testing::Deadline;
use tempfile::TempDir;

use crate::{Ended, run_command, try_command};

/// Timeout of Ceph's commands, which wait for the cluster.
const COMMAND: Duration = Duration::from_secs(60);

/// A running cluster. The daemons of the cluster end with the thread that has started them.
#[derive(Debug)]
pub struct Cluster {
    // Fields are dropped in order, so the daemons end before their directory is removed.
    osds: Vec<Option<Process>>,
    manager: Process,
    monitor: Option<Process>,
    dir: TempDir,
}

impl Cluster {
    /// Starts a cluster whose OSDs have `bytes` bytes each.
    ///
    /// The pool `rbd` has as many copies as the cluster has OSDs, but at most two.
    ///
    /// # Panics
    /// With the log of the program that has not started. `sh tools/setup.sh cluster` installs all
    /// programs.
    pub fn start(osds: usize, bytes: u64) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("fathom-ceph-")
            .tempdir_in("/tmp");
        let dir = dir.expect("a directory for a cluster");
        let fsid = make_uuid();
        let port = free_port();
        configure(dir.path(), &fsid, port, osds.min(2), bytes);
        let keys = [
            ("mon.", vec!["mon", "allow *"]),
            (
                "client.admin",
                vec!["mon", "allow *", "osd", "allow *", "mgr", "allow *"],
            ),
            ("mgr.x", vec!["mon", "allow profile mgr", "osd", "allow *"]),
        ];
        let osd_caps = vec![
            "mon",
            "allow profile osd",
            "osd",
            "allow *",
            "mgr",
            "allow profile osd",
        ];
        let of_osds = (0..osds).map(|n| (format!("osd.{n}"), osd_caps.clone()));
        let keys = keys.map(|(name, caps)| (name.to_owned(), caps));
        let keyring = dir.path().join("keyring");
        fs::write(&keyring, "").expect("a keyring");
        for (name, caps) in keys.into_iter().chain(of_osds) {
            let mut command = Command::new("ceph-authtool");
            command.arg(&keyring).args(["--gen-key", "--name", &name]);
            for cap in caps.chunks(2) {
                command.arg("--cap").args(cap);
            }
            done(command);
        }
        let map = dir.path().join("monmap");
        let mut command = Command::new("monmaptool");
        let address = format!("[v2:127.0.0.1:{port}]");
        command
            .args(["--create", "--addv", "a", &address, "--fsid", &fsid])
            .arg(&map);
        done(command);
        let mut command = program(dir.path(), "ceph-mon");
        command.args(["--mkfs", "-i", "a", "--monmap"]).arg(&map);
        done(command);
        let mut cluster = Self {
            osds: Vec::new(),
            monitor: Some(start_daemon(dir.path(), "mon", "a")),
            manager: start_daemon(dir.path(), "mgr", "x"),
            dir,
        };
        for n in 0..osds {
            cluster.make_osd(n);
        }
        cluster.ceph(&["osd", "pool", "create", "rbd", "8"]);
        cluster.rbd(&["pool", "init", "rbd"]);
        cluster
    }

    fn make_osd(&mut self, n: usize) {
        let (uuid, id) = (make_uuid(), n.to_string());
        self.ceph(&["osd", "new", &uuid, &id]);
        let data = self.dir.path().join(format!("osd.{n}"));
        fs::create_dir(&data).expect("a directory for an OSD");
        let mut command = program(self.dir.path(), "ceph-osd");
        command.args(["--mkfs", "-i", &id, "--osd-uuid", &uuid]);
        done(command);
        self.osds
            .push(Some(start_daemon(self.dir.path(), "osd", &id)));
    }

    /// Returns the path of the configuration, for programs that use the cluster.
    pub fn conf(&self) -> PathBuf {
        self.dir.path().join("ceph.conf")
    }

    /// Returns Fathom's name for an image of the pool `rbd`.
    pub fn image(&self, name: &str) -> String {
        format!("rbd:rbd/{name}?conf={}", self.conf().display())
    }

    /// Returns QEMU's name for an image of the pool `rbd`.
    pub fn for_qemu(&self, name: &str) -> String {
        format!("rbd:rbd/{name}:conf={}", self.conf().display())
    }

    /// Returns the output of `ceph ARGUMENTS`.
    ///
    /// # Panics
    /// With the command's output if it fails.
    pub fn ceph(&self, arguments: &[&str]) -> String {
        self.ask("ceph", arguments)
    }

    /// Returns the output of `rbd ARGUMENTS`.
    ///
    /// # Panics
    /// With the command's output if it fails.
    pub fn rbd(&self, arguments: &[&str]) -> String {
        self.ask("rbd", arguments)
    }

    /// Runs `rbd ARGUMENTS`, which may fail.
    pub fn try_rbd(&self, arguments: &[&str]) -> Ended {
        let mut command = program(self.dir.path(), "rbd");
        command.args(arguments);
        run_command(command, COMMAND)
    }

    fn ask(&self, name: &str, arguments: &[&str]) -> String {
        let mut command = program(self.dir.path(), name);
        command.args(arguments);
        let shown = format!("{command:?}");
        let ended = try_command(command, COMMAND);
        let ended = ended.unwrap_or_else(|error| panic!("{error}\n{}", self.last_words()));
        assert_eq!(ended.code, Some(0), "{shown}: {}", ended.stderr);
        ended.stdout
    }

    /// Returns the last log lines of all daemons.
    fn last_words(&self) -> String {
        let daemons = { self.osds.iter().flatten() }
            .chain(&self.monitor)
            .chain([&self.manager]);
        let said = daemons.map(|one| format!("{}: {}", one.name(), one.tail()));
        said.collect::<Vec<_>>().join("\n")
    }

    /// Kills an OSD. The objects of the OSD are lost, because they are in memory.
    ///
    /// # Panics
    /// If the OSD does not run.
    pub fn kill_osd(&mut self, n: usize) {
        let mut osd = self.osds[n].take().expect("it runs");
        osd.kill().expect("a child");
    }

    /// Kills the monitor, whose state is kept.
    ///
    /// # Panics
    /// If the monitor does not run.
    pub fn kill_monitor(&mut self) {
        let mut monitor = self.monitor.take().expect("it runs");
        monitor.kill().expect("a child");
    }

    /// Starts the monitor again.
    pub fn start_monitor(&mut self) {
        self.monitor = Some(start_daemon(self.dir.path(), "mon", "a"));
    }

    /// Starts a killed OSD again, without its objects.
    pub fn start_osd(&mut self, n: usize) {
        let id = n.to_string();
        let mut command = program(self.dir.path(), "ceph-osd");
        let data = self.dir.path().join(format!("osd.{n}"));
        fs::remove_dir_all(&data).expect("its old place");
        fs::create_dir(&data).expect("a directory for an OSD");
        let known = self.ceph(&["osd", "dump", "--format", "json"]);
        let known: serde_json::Value = serde_json::from_str(&known).expect("JSON");
        let uuid = known["osds"][n]["uuid"]
            .as_str()
            .expect("it is known")
            .to_owned();
        command.args(["--mkfs", "-i", &id, "--osd-uuid", &uuid]);
        done(command);
        self.osds[n] = Some(start_daemon(self.dir.path(), "osd", &id));
    }

    /// Waits until all copies of all objects exist.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_until_clean(&self) {
        let deadline = Deadline::new("all copies of everything");
        loop {
            let said = self.ceph(&["pg", "stat"]);
            let is_clean = [
                "degraded",
                "peering",
                "unknown",
                "undersized",
                "down",
                "stale",
                "creating",
            ]
            .iter()
            .all(|state| !said.contains(state));
            if is_clean {
                return;
            }
            deadline.check_with(|| said);
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// Returns a command of Ceph that is configured for the cluster.
fn program(dir: &Path, name: &str) -> Command {
    let mut command = Command::new(name);
    command.arg("--conf").arg(dir.join("ceph.conf"));
    command
}

fn start_daemon(dir: &Path, kind: &str, id: &str) -> Process {
    let mut command = program(dir, &format!("ceph-{kind}"));
    command.args(["-f", "-i", id]);
    let log = dir.join(format!("{kind}.{id}.out"));
    let started = Process::spawn(&format!("{kind}.{id}"), command, &log);
    started.unwrap_or_else(|error| panic!("{error}: `sh tools/setup.sh cluster` installs Ceph"))
}

fn done(command: Command) -> String {
    let shown = format!("{command:?}");
    let ended = run_command(command, COMMAND);
    assert_eq!(ended.code, Some(0), "{shown}: {}", ended.stderr);
    ended.stdout
}

fn make_uuid() -> String {
    let made = fs::read_to_string("/proc/sys/kernel/random/uuid").expect("the kernel makes them");
    made.trim().to_owned()
}

/// Returns a port on which no process listens. Another process may still take it.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}

fn configure(dir: &Path, fsid: &str, port: u16, copies: usize, bytes: u64) {
    let at = dir.display();
    let text = format!(
        "[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{port}]
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {at}/keyring
run dir = {at}
admin socket = {at}/$name.$pid.asok
log file = {at}/$name.log
mon data = {at}/$name
mgr data = {at}/$name
osd data = {at}/$name
osd objectstore = memstore
memstore device bytes = {bytes}
osd memory target = 939524096
osd pool default size = {copies}
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail warn = -1
mon data avail crit = -1
mgr stats period = 1
ms bind ipv6 = false
[client]
admin socket =
log file =
"
    );
    fs::write(dir.join("ceph.conf"), text).expect("a configuration");
    for daemon in ["mon.a", "mgr.x"] {
        fs::create_dir(dir.join(daemon)).expect("a directory for a daemon");
    }
}
