//! A guest that moves between two hosts, together with its disk or with a disk that both hosts
//! reach.

use std::path::{Path, PathBuf};
use std::process::Command;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_testing::Deadline;
use serde_json::json;

use crate::Place;
use crate::hosts::Hosts;
use crate::image::{Image, Kind};

/// Size of the disk in bytes.
pub const SIZE: u64 = 512 << 20;

/// The state of one host: its server, its guest, and its image.
#[derive(Debug)]
pub struct Stay {
    /// The server, which exports the image to the guest.
    pub server: Server,
    /// The guest, while it runs on this host.
    pub guest: Guest,
    /// The disk's image on this host.
    pub image: Image,
}

/// The configuration that all moves of a guest share.
#[derive(Debug)]
pub struct Moves {
    /// Whether both hosts reach the disk, which is not moved then.
    shared: bool,
    hosts: Hosts,
    place: Place,
    certificates: PathBuf,
}

impl Moves {
    /// Creates two hosts without a guest. If `shared` is set, both reach the same image.
    ///
    /// # Panics
    /// If the hosts or the certificates cannot be created.
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

    /// Starts the nth server, alternately on either host. The new server pulls the disk of the
    /// previous one.
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

    /// Returns the URI of the server whose disk the nth one pulls.
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

    /// Starts the last server, whose disk follows the guest (post-copy).
    fn serve_follower(&self, n: usize, image: &Image) -> Server {
        let uri = self.before(n);
        let args = ["--pull", &uri, "--pull-post-copy", "--pull-speed", "16M"];
        self.start(n, image, &args)
    }

    /// Prepares the other host for a guest whose disk follows.
    ///
    /// # Panics
    /// If the server is not ready in time.
    #[must_use]
    pub fn prepare_follower(&self, n: usize) -> Stay {
        let image = Image::create(self.place.path("follower"), Kind::RAW, SIZE);
        let mut server = self.serve_follower(n, &image);
        wait_for_log(&mut server, "the guest can move here");
        self.stay(n, server, image)
    }

    /// Kills the server of a disk that follows, and starts it again.
    ///
    /// # Panics
    /// If the server does not start.
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

    /// Boots the guest on the first host.
    ///
    /// # Panics
    /// If the guest does not boot.
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

    /// Prepares the other host for the guest's nth move. Waits until the disk is ready to move.
    ///
    /// # Panics
    /// If the disk is not ready in time.
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
    /// If the server does not start.
    pub fn replace_server(&self, stay: &mut Stay, n: usize) {
        stay.server.process().kill().unwrap();
        stay.image.check_consistent();
        stay.server = self.serve(n, &stay.image);
    }

    /// Starts the migration of the guest, without waiting for its end.
    ///
    /// # Panics
    /// If QEMU refuses.
    pub fn migrate(&self, from: &mut Stay, to: &mut Stay, n: usize) {
        let port = 4000 + n % 100;
        let listen = json!({"uri": format!("tcp:0.0.0.0:{port}")});
        to.guest.qmp("migrate-incoming", listen).unwrap();
        let address = self.hosts.address(n % 2);
        let uri = json!({"uri": format!("tcp:{address}:{port}")});
        from.guest.qmp("migrate", uri).unwrap();
    }
}

/// Waits until the server's log contains these words.
///
/// # Panics
/// If the words do not appear in time.
pub fn wait_for_log(server: &mut Server, words: &str) {
    wait_for_nth(server, words, 1);
}

/// Waits until the server's log contains these words `n` times.
///
/// # Panics
/// If the words do not appear in time.
pub fn wait_for_nth(server: &mut Server, words: &str, n: usize) {
    let what = format!("'{words}' in the log");
    let deadline = Deadline::new(&what);
    while server.process().log().matches(words).count() < n {
        deadline.check_with(|| server.process().log());
        deadline.pause();
    }
}

/// Creates one key and certificate that all servers and clients use.
///
/// # Panics
/// If they cannot be created.
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
