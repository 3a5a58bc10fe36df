//! Servers of the appliances' disks. All disks have the same image, which is read-only.

use std::fmt::Write;
use std::path::Path;

use crate::bed::DISK;
use crate::error::Result;
use crate::machine::{Disk, QemuDisk};
use crate::server::Server;
use crate::words::words;

words! {
    /// The servers of the disks.
    pub enum Disks {
        /// No disks.
        None = "none",
        /// A single Fathom server for all disks.
        Fathom = "fathom",
        /// A Fathom server for each disk.
        FathomEach = "fathom-each",
        /// The QEMU of each appliance.
        Qemu = "qemu",
    }
}

/// Disks and their servers.
#[derive(Default)]
pub struct Served {
    /// The disk of each appliance, if it has one.
    pub disks: Vec<Option<Disk>>,
    pub servers: Vec<Server>,
}

impl Disks {
    /// Whether a server other than QEMU accesses the guest's memory.
    pub fn share_memory(self) -> bool {
        matches!(self, Disks::Fathom | Disks::FathomEach)
    }

    /// Starts servers of the image for `count` appliances. Sockets and logs are created in `dir`.
    ///
    /// # Errors
    /// If a server does not start, with its last output.
    pub fn serve(self, count: usize, fathom: &Path, dir: &Path, image: &Path) -> Result<Served> {
        let vhost_user = |socket: &Path| Some(Disk::vhost_user(DISK, socket).with_queues(1));
        match self {
            Disks::None => Ok(Served {
                disks: vec![None; count],
                ..Served::default()
            }),
            Disks::Qemu => Ok(Served {
                disks: vec![Some(Disk::qemu(DISK, QemuDisk::read_only(image))); count],
                ..Served::default()
            }),
            Disks::FathomEach => {
                let (mut served, image) = (Served::default(), image.to_string_lossy());
                let options = ["--readonly", "--cache=writeback", "--queues=1"];
                for number in 1..=count {
                    let name = number.to_string();
                    let server = Server::fathom(fathom, dir, &name, &image, &options)?;
                    served.disks.push(vhost_user(server.socket()));
                    served.servers.push(server);
                }
                Ok(served)
            }
            Disks::Fathom => {
                let sockets = (1..=count).map(|number| dir.join(format!("{number}.sock")));
                let sockets: Vec<_> = sockets.collect();
                let config = config(&dir.join("api"), image, &sockets);
                let last = sockets.last().map_or(dir, |socket| socket);
                let server = Server::fathom_configured(fathom, dir, "all", &config, last)?;
                Ok(Served {
                    disks: sockets.iter().map(|socket| vhost_user(socket)).collect(),
                    servers: vec![server],
                })
            }
        }
    }
}

/// Returns a configuration with a disk per socket, all with this image, and served by one pool.
fn config(api: &Path, image: &Path, sockets: &[impl AsRef<Path>]) -> String {
    // Rust's string syntax is valid TOML for all characters that occur in our paths.
    let mut text = format!("api = {{ socket = {api:?} }}\n[pool.all]\n");
    for (number, socket) in (1..).zip(sockets) {
        let socket = socket.as_ref();
        // Writing to a string never fails.
        let _ = write!(
            text,
            "[[disk]]\nname = \"{number}\"\nimage = {image:?}\nvhost-user = {socket:?}\n\
             readonly = true\ncache = \"writeback\"\nqueues = 1\npool = \"all\"\n"
        );
    }
    text
}
