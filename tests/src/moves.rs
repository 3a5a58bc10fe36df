//! A guest that moves between two hosts with its disk, or over a disk that both reach.

use std::path::{Path, PathBuf};
use std::process::Command;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_testing::Deadline;
use serde_json::json;

use crate::Place;
use crate::hosts::Hosts;
use crate::image::{Image, Kind};

/// Of the disk, in bytes.
pub const SIZE: u64 = 512 << 20;

/// One host's part: its server, and the guest that it has.
#[derive(Debug)]
pub struct Stay {
    pub server: Server,
    pub guest: Guest,
    pub image: Image,
}

/// All that the moves have in common.
#[derive(Debug)]
pub struct Moves {
    /// The disk is shared, and does not move.
    shared: bool,
    hosts: Hosts,
    place: Place,
    certificates: PathBuf,
}

impl Moves {
    /// Two hosts, and no guest yet. `shared`: both reach the disk's image, as it is.
    ///
    /// # Panics
    /// When there can be no hosts or no certificates.
    #[must_use]
    pub fn new(shared: bool) -> Moves {
        let place = Place::new();
        let certificates = place.path("tls");
        make_certificates(&certificates);
        Moves {
            shared,
            hosts: Hosts::new(),
            place,
            certificates,
        }
    }

    fn image(&self, n: usize) -> Image {
        let n = if self.shared { 0 } else { n };
        let kind = [
            Kind::RAW,
            Kind::QCOW2_SMALL,
            Kind::QED_SMALL,
            Kind::QCOW2_SMALL,
        ][n % 4];
        let path = self.place.path(&format!("disk-{n}"));
        if self.shared && path.exists() {
            return Image::at(path, kind);
        }
        let _ = std::fs::remove_file(&path);
        let mut record = path.clone().into_os_string();
        record.push(".pull");
        let _ = std::fs::remove_file(record);
        Image::create(path, kind, SIZE)
    }

    /// The nth server, on a host of its own; it pulls from the one before.
    fn serve(&self, n: usize, image: &Image) -> Server {
        let certificates = self.certificates.display().to_string();
        let mut args = Vec::new();
        if !self.shared {
            args.extend([
                "--nbd",
                "tcp:0.0.0.0:10809",
                "--export-name",
                "d",
                "--nbd-move",
                "--tls-certificates",
                &certificates,
                "--tls-verify-peer",
            ]);
        }
        let uri = self.before(n);
        if !self.shared && n > 0 {
            args.extend(["--pull", &uri]);
        }
        self.start(n, image, &args)
    }

    /// The server whose disk the nth one is to have.
    fn before(&self, n: usize) -> String {
        let certificates = self.certificates.display();
        let from = self.hosts.address((n + 1) % 2);
        format!("nbds://{from}/d?tls-certificates={certificates}&tls-hostname=localhost")
    }

    fn start(&self, n: usize, image: &Image, args: &[&str]) -> Server {
        let name = format!("server-{n}");
        self.hosts
            .on(n % 2, || image.serve(&self.place, &name, args))
    }

    /// The last server, whose disk follows the guest.
    fn serve_follower(&self, n: usize, image: &Image) -> Server {
        let uri = self.before(n);
        let args = ["--pull", &uri, "--pull-post-copy", "--pull-speed", "16M"];
        self.start(n, image, &args)
    }

    /// What waits for the guest on the other host, where its disk follows.
    ///
    /// # Panics
    /// When it does not, for long.
    #[must_use]
    pub fn prepare_follower(&self, n: usize) -> Stay {
        let image = Image::create(self.place.path("follower"), Kind::RAW, SIZE);
        let mut server = self.serve_follower(n, &image);
        wait_for_log(&mut server, "the guest can move here");
        self.stay(n, server, image)
    }

    /// Kills its server, and starts it again.
    ///
    /// # Panics
    /// When it does not start.
    pub fn replace_follower(&self, stay: &mut Stay, n: usize) {
        stay.server.process().kill().unwrap();
        stay.server = self.serve_follower(n, &stay.image);
    }

    fn machine(&self, server: &Server, incoming: bool) -> Machine {
        Machine {
            cpus: 2,
            memory_mib: 192,
            disks: vec![Disk::vhost_user("disk", server.socket()).with_reconnect()],
            incoming,
            ..Machine::default()
        }
    }

    /// The guest on the first host.
    ///
    /// # Panics
    /// When it does not boot.
    #[must_use]
    pub fn begin(&self) -> Stay {
        let image = self.image(0);
        let server = self.serve(0, &image);
        let machine = self.machine(&server, false);
        let guest = self.hosts.on(0, || Guest::boot(&machine).unwrap());
        Stay {
            server,
            guest,
            image,
        }
    }

    /// What waits for the guest on the other host, for its nth move: its disk is ready to come.
    ///
    /// # Panics
    /// When it is not, for long.
    #[must_use]
    pub fn prepare(&self, n: usize) -> Stay {
        let image = self.image(n);
        let mut server = self.serve(n, &image);
        if !self.shared {
            wait_for_log(&mut server, "the guest can move here");
        }
        self.stay(n, server, image)
    }

    fn stay(&self, n: usize, server: Server, image: Image) -> Stay {
        let machine = self.machine(&server, true);
        let guest = self.hosts.on(n % 2, || Guest::start(&machine).unwrap());
        Stay {
            server,
            guest,
            image,
        }
    }

    /// Kills the server of the guest's nth stay, and starts it again.
    ///
    /// # Panics
    /// When it does not start.
    pub fn replace_server(&self, stay: &mut Stay, n: usize) {
        stay.server.process().kill().unwrap();
        stay.image.check_consistent();
        stay.server = self.serve(n, &stay.image);
    }

    /// Lets the guest go; does not wait for it.
    ///
    /// # Panics
    /// When QEMU does not want to.
    pub fn migrate(&self, from: &mut Stay, to: &mut Stay, n: usize) {
        let port = 4000 + n % 100;
        let listen = json!({"uri": format!("tcp:0.0.0.0:{port}")});
        to.guest.qmp("migrate-incoming", listen).unwrap();
        let address = self.hosts.address(n % 2);
        let uri = json!({"uri": format!("tcp:{address}:{port}")});
        from.guest.qmp("migrate", uri).unwrap();
    }
}

/// Waits until a server has said this.
///
/// # Panics
/// When it does not, for long.
pub fn wait_for_log(server: &mut Server, words: &str) {
    wait_for_nth(server, words, 1);
}

/// Likewise, so many times.
///
/// # Panics
/// Likewise.
pub fn wait_for_nth(server: &mut Server, words: &str, n: usize) {
    let what = format!("'{words}' in the log");
    let deadline = Deadline::new(&what);
    while server.process().log().matches(words).count() < n {
        deadline.check_with(|| server.process().log());
        deadline.pause();
    }
}

/// One key and certificate for all, in both roles.
///
/// # Panics
/// When they cannot be made.
pub fn make_certificates(dir: &Path) {
    std::fs::create_dir(dir).unwrap();
    let script = "cd \"$0\"
        openssl req -x509 -nodes -newkey rsa:2048 -days 2 -subj /CN=ours \
            -keyout ca-key.pem -out ca-cert.pem 2>/dev/null
        openssl req -nodes -newkey rsa:2048 -subj /CN=localhost -out request \
            -keyout server-key.pem 2>/dev/null
        echo 'subjectAltName=DNS:localhost,IP:10.77.0.1,IP:10.77.0.2' >names
        openssl x509 -req -in request -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 \
            -extfile names -out server-cert.pem 2>/dev/null
        cp server-key.pem client-key.pem
        cp server-cert.pem client-cert.pem";
    let made = Command::new("sh").args(["-ec", script]).arg(dir).status();
    assert!(made.unwrap().success());
}
