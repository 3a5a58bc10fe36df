//! Servers of a guest's disk. Each kind has one file, and one list has all kinds.

mod fathom;
mod process;
mod qemu;
mod qsd;
mod virtiofsd;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::machine::{Aio, Bus, Disk, Format};

pub use process::Server;
pub use virtiofsd::VIRTIOFSD;

/// A kind of server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `fathom serve`, over vhost-user.
    Fathom,
    /// QEMU's own virtio-blk or virtio-scsi, in an I/O thread.
    Qemu,
    /// QEMU itself, in its main loop.
    QemuMain,
    /// QEMU's main loop without ioeventfd: a vCPU that kicks runs QEMU's code before it resumes the
    /// guest.
    QemuNoIoeventfd,
    /// QEMU's own virtio-blk or virtio-scsi, with its queues distributed to I/O threads.
    QemuMapped,
    /// qemu-storage-daemon, over vhost-user.
    Qsd,
    /// An already running server that listens on this vhost-user socket.
    Socket(PathBuf),
}

/// Specification of a disk, for every kind of server.
#[derive(Clone, Debug)]
pub struct Spec<'a> {
    /// Path of the `fathom` program.
    pub fathom: &'a Path,
    /// Folder for sockets and logs.
    pub dir: &'a Path,
    /// QEMU's id of the disk.
    pub name: &'a str,
    /// A file, a block device, or the URI of an NBD server's export.
    pub image: &'a Path,
    /// Format of the image.
    pub format: Format,
    /// The bus or device type that the guest sees.
    pub bus: Bus,
    /// I/O engine with which the server reads and writes the image.
    pub aio: Aio,
    /// QEMU's cache mode: `none`, `writeback`, `writethrough`, ...
    pub cache: &'a str,
    /// Number of the disk's request queues.
    pub queues: u16,
    /// Number of I/O threads, for a server that can have several. If `None`, the server's default.
    pub threads: Option<u16>,
    /// Whether the server polls before it sleeps, in its default way.
    pub poll: bool,
    /// Additional options of `fathom serve`.
    pub options: Vec<String>,
    /// Additional properties of QEMU's device.
    pub properties: Vec<String>,
}

/// A raw image on virtio-blk with one queue and without the page cache. The paths and the name are
/// empty.
impl Default for Spec<'_> {
    fn default() -> Self {
        Spec {
            fathom: Path::new(""),
            dir: Path::new(""),
            name: "",
            image: Path::new(""),
            format: Format::Raw,
            bus: Bus::VirtioBlk,
            aio: Aio::IoUring,
            cache: "none",
            queues: 1,
            threads: None,
            poll: true,
            options: Vec::new(),
            properties: Vec::new(),
        }
    }
}

/// A disk and its server.
#[derive(Debug)]
pub struct Served {
    /// The disk to add to the machine.
    pub disk: Disk,
    /// The started server. `None` if QEMU itself or an already running server serves the disk.
    pub server: Option<Server>,
}

const SOCKET: &str = "socket:";
/// Words of the kinds that the lab starts itself.
pub const OWN_FORM: &str = "fathom, qemu, qemu-main, qemu-no-ioeventfd, qemu-mapped, qsd";
/// Words of all kinds.
pub const FORM: &str = "fathom, qemu, qemu-main, qemu-no-ioeventfd, qemu-mapped, qsd, socket:PATH";

impl Kind {
    /// All kinds without a parameter.
    pub const ALL: [Kind; 6] = [
        Kind::Fathom,
        Kind::Qemu,
        Kind::QemuMain,
        Kind::QemuNoIoeventfd,
        Kind::QemuMapped,
        Kind::Qsd,
    ];

    fn word(&self) -> &'static str {
        match self {
            Kind::Fathom => "fathom",
            Kind::Qemu => "qemu",
            Kind::QemuMain => "qemu-main",
            Kind::QemuNoIoeventfd => "qemu-no-ioeventfd",
            Kind::QemuMapped => "qemu-mapped",
            Kind::Qsd => "qsd",
            Kind::Socket(_) => SOCKET,
        }
    }

    /// Returns whether QEMU itself serves the disk.
    pub fn is_in_qemu(&self) -> bool {
        match self {
            Kind::Qemu | Kind::QemuMain | Kind::QemuNoIoeventfd | Kind::QemuMapped => true,
            Kind::Fathom | Kind::Qsd | Kind::Socket(_) => false,
        }
    }

    /// Checks the specification before anything is started.
    ///
    /// # Errors
    /// When this kind does not support the specification, or this machine lacks what the kind
    /// needs.
    pub fn check(&self, spec: &Spec) -> Result<()> {
        let bad = |what: String| Err(Error::Protocol(format!("{what}: not with --disk {self}")));
        if *self != Kind::Fathom && !spec.options.is_empty() {
            return bad(format!(
                "options of `fathom serve` ({})",
                spec.options.join(" ")
            ));
        }
        if !self.is_in_qemu() && spec.bus != Bus::VirtioBlk {
            return bad(format!("vhost-user disks are virtio-blk, not {}", spec.bus));
        }
        match self {
            Kind::Fathom => Ok(()),
            Kind::Qemu | Kind::QemuMain | Kind::QemuNoIoeventfd | Kind::QemuMapped => {
                qemu::check(self, spec)
            }
            Kind::Qsd => qsd::check(spec),
            Kind::Socket(path) if path.exists() => Ok(()),
            Kind::Socket(path) => Err(Error::Unusable {
                path: path.clone(),
                reason: "no vhost-user socket exists; start its server first".into(),
            }),
        }
    }

    /// Starts the server, if this kind has a separate process.
    ///
    /// # Errors
    /// When the server does not start; the error has the last lines of its log.
    pub fn serve(&self, spec: &Spec) -> Result<Served> {
        let queues = spec.queues;
        let vhost_user = |socket: &Path| Disk::vhost_user(spec.name, socket).with_queues(queues);
        let (disk, server) = match self {
            Kind::Fathom => served(fathom::start(spec)?, &vhost_user),
            Kind::Qsd => served(qsd::start(spec)?, &vhost_user),
            Kind::Socket(path) => (vhost_user(path), None),
            Kind::Qemu | Kind::QemuMain | Kind::QemuNoIoeventfd | Kind::QemuMapped => {
                (qemu::disk(self, spec), None)
            }
        };
        let with = |disk: Disk, property: &String| disk.with_property(property);
        let disk = spec.properties.iter().fold(disk, with);
        Ok(Served { disk, server })
    }
}

fn served(server: Server, vhost_user: &dyn Fn(&Path) -> Disk) -> (Disk, Option<Server>) {
    (vhost_user(server.socket()), Some(server))
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Socket(path) => write!(f, "{SOCKET}{}", path.display()),
            other => f.write_str(other.word()),
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Kind, String> {
        if let Some(path) = text.strip_prefix(SOCKET).filter(|path| !path.is_empty()) {
            return Ok(Kind::Socket(path.into()));
        }
        let found = Kind::ALL.into_iter().find(|kind| kind.word() == text);
        found.ok_or_else(|| {
            let words = Kind::ALL.each_ref().map(Kind::word).join(", ");
            format!("'{text}' is none of {words} and {SOCKET}PATH")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_written() {
        for kind in Kind::ALL.into_iter().chain([Kind::Socket("/s".into())]) {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let error = "disk".parse::<Kind>().unwrap_err();
        let words = "fathom, qemu, qemu-main, qemu-no-ioeventfd, qemu-mapped, qsd and socket:PATH";
        assert_eq!(error, format!("'disk' is none of {words}"));
        assert!("socket:".parse::<Kind>().is_err());
    }

    #[test]
    fn a_server_that_cannot_start_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing.img");
        let spec = Spec {
            fathom: Path::new("/nonexistent"),
            dir: dir.path(),
            name: "d",
            image: &missing,
            ..Spec::default()
        };
        let error = Kind::Qsd.serve(&spec).unwrap_err().to_string();
        assert!(error.contains("missing.img"), "{error}");
        let nobody = Kind::Socket(dir.path().join("s"));
        assert!(
            nobody
                .check(&spec)
                .unwrap_err()
                .to_string()
                .contains("no vhost-user socket")
        );
        let on_ide = Spec {
            bus: Bus::Ide,
            ..spec.clone()
        };
        for (kind, words) in [
            (Kind::Fathom, "vhost-user disks are virtio-blk"),
            (Kind::Qemu, "only with --disk qemu-main"),
        ] {
            let error = kind.check(&on_ide).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        Kind::QemuMain.check(&on_ide).unwrap();
        let options = vec!["--filter=pause".to_owned()];
        let filtered = Spec { options, ..spec };
        let error = Kind::Qsd.check(&filtered).unwrap_err().to_string();
        assert!(
            error.contains("--filter=pause") && error.contains("--disk qsd"),
            "{error}"
        );
    }
}
