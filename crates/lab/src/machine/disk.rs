//! Disks of a machine, and their options on QEMU's command line.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::bus::{Bus, Place};
use super::{Arguments, Boot, comma_safe};
use crate::error::Result;
use crate::host;
use crate::words::words;

const FIRST_DISK_SLOT: u8 = 4;

/// How the machine's QEMU accesses a disk.
#[derive(Debug, Clone)]
pub enum Attach {
    /// Served by another process over a vhost-user socket.
    VhostUser {
        /// Path of the server's socket.
        socket: PathBuf,
        /// Number of request queues. If `None`, QEMU chooses one per CPU.
        queues: Option<u16>,
        /// Whether QEMU reconnects when the server exits.
        reconnect: bool,
    },
    /// A raw file opened by QEMU itself.
    Raw(PathBuf),
    /// An image served by QEMU in a configurable way.
    Qemu(QemuDisk),
}

words! {
    /// Asynchronous I/O engine with which QEMU reads and writes an image.
    pub enum Aio {
        /// Linux's io_uring.
        IoUring = "io_uring",
        /// Linux AIO, which needs direct I/O.
        Native = "native",
        /// A pool of threads that make blocking system calls.
        Threads = "threads",
    }
}

words! {
    /// Format of an image file.
    pub enum Format {
        /// The disk's bytes without metadata.
        Raw = "raw",
        /// QEMU's copy-on-write format, version 2 or 3.
        Qcow2 = "qcow2",
        /// QEMU's enhanced disk format, which qcow2 has replaced.
        Qed = "qed",
    }
}

/// A disk that QEMU itself serves.
#[derive(Debug, Clone)]
pub struct QemuDisk {
    /// A file, a block device, or the URI of an NBD server's export.
    pub image: PathBuf,
    /// Format of the image.
    pub format: Format,
    /// The bus or device type that the guest sees.
    pub bus: Bus,
    /// QEMU's asynchronous I/O engine for the image.
    pub aio: Aio,
    /// QEMU's cache mode: `none`, `writeback`, ...
    pub cache: String,
    /// Whether the guest can only read.
    pub read_only: bool,
    /// The QEMU threads that serve the disk.
    pub serving: Serving,
    /// Number of request queues, for buses with several. If `None`, QEMU chooses one per CPU.
    pub queues: Option<u16>,
}

/// The QEMU threads that serve a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serving {
    /// The main loop.
    Main,
    /// A separate I/O thread.
    Thread {
        /// Maximum polling time before the thread sleeps, in nanoseconds. If `None`, QEMU's
        /// default.
        polling: Option<u32>,
    },
    /// Several I/O threads, to which the queues are distributed.
    Mapped {
        /// Number of I/O threads.
        threads: u16,
        /// Maximum polling time before a thread sleeps, in nanoseconds. If `None`, QEMU's default.
        polling: Option<u32>,
    },
}

impl QemuDisk {
    /// Returns a read-only raw disk on virtio-blk that QEMU's main loop serves.
    pub fn read_only(image: &Path) -> Self {
        Self {
            image: image.to_owned(),
            format: Format::Raw,
            bus: Bus::VirtioBlk,
            aio: Aio::Threads,
            cache: "writeback".into(),
            read_only: true,
            serving: Serving::Main,
            queues: None,
        }
    }
}

/// A disk of a machine.
#[derive(Debug, Clone)]
pub struct Disk {
    /// QEMU's id of the device.
    pub id: String,
    /// How QEMU accesses the disk.
    pub attach: Attach,
    /// Additional properties of the device, such as `disable-legacy=on`.
    pub properties: Vec<String>,
}

impl Disk {
    /// Returns a vhost-user disk with QEMU's default number of queues and without reconnection.
    pub fn vhost_user(id: &str, socket: &Path) -> Self {
        let socket = socket.to_owned();
        let attach = Attach::VhostUser {
            socket,
            queues: None,
            reconnect: false,
        };
        Self {
            id: id.to_owned(),
            attach,
            properties: Vec::new(),
        }
    }

    /// Returns a disk that QEMU serves.
    pub fn qemu(id: &str, disk: QemuDisk) -> Self {
        Self {
            id: id.to_owned(),
            attach: Attach::Qemu(disk),
            properties: Vec::new(),
        }
    }

    /// Sets the number of request queues of a vhost-user disk.
    #[must_use]
    pub fn with_queues(mut self, count: u16) -> Self {
        if let Attach::VhostUser { queues, .. } = &mut self.attach {
            *queues = Some(count);
        }
        self
    }

    /// Makes QEMU reconnect when a vhost-user server exits.
    #[must_use]
    pub fn with_reconnect(mut self) -> Self {
        if let Attach::VhostUser { reconnect, .. } = &mut self.attach {
            *reconnect = true;
        }
        self
    }

    /// Sets a property of the device.
    #[must_use]
    pub fn with_property(mut self, property: &str) -> Self {
        self.properties.push(property.to_owned());
        self
    }

    /// Returns the bus or device type that the guest sees.
    pub(crate) fn bus(&self) -> Bus {
        match &self.attach {
            Attach::Qemu(disk) => disk.bus,
            Attach::VhostUser { .. } | Attach::Raw(_) => Bus::VirtioBlk,
        }
    }

    /// Returns the guest's PCI address of the `index`th disk: slot and function.
    pub(crate) fn address(&self, index: usize) -> String {
        match self.bus() {
            Bus::Ide => super::bus::IDE_ADDRESS.to_owned(),
            _ => format!("{:02x}.0", Disk::slot(index)),
        }
    }

    /// Returns the PCI slot of the `index`th disk.
    pub(crate) fn slot(index: usize) -> u8 {
        let index = u8::try_from(index).expect("the number of disks is checked");
        FIRST_DISK_SLOT + index
    }
}

pub(super) fn push(args: &mut Arguments, disk: &Disk, index: usize, boot: Boot) -> Result<()> {
    let id = &disk.id;
    let slot = Disk::slot(index);
    // If a kernel is given, QEMU boots it before any disk.
    let order = if boot == Boot::Kernel {
        String::new()
    } else {
        format!(",bootindex={index}")
    };
    let more: String = { disk.properties.iter() }
        .map(|property| format!(",{property}"))
        .collect();
    let place = format!("id={id},addr={slot:x}{order}{more}");
    match &disk.attach {
        Attach::VhostUser {
            socket,
            queues,
            reconnect,
        } => {
            let path = comma_safe(socket);
            let reconnect = if *reconnect {
                reconnect_option(host::qemu_version()?)
            } else {
                ""
            };
            args.option(
                "-chardev",
                format!("socket,id={id}-socket,path={path}{reconnect}"),
            );
            let queues = queues
                .map(|n| format!(",num-queues={n}"))
                .unwrap_or_default();
            args.option(
                "-device",
                format!("vhost-user-blk-pci,chardev={id}-socket,{place}{queues}"),
            );
        }
        Attach::Raw(path) => {
            let path = comma_safe(path);
            args.option(
                "-drive",
                format!("if=none,id={id}-file,format=raw,cache=none,discard=unmap,file={path}"),
            );
            args.option("-device", format!("virtio-blk-pci,drive={id}-file,{place}"));
        }
        Attach::Qemu(disk) => {
            let place = Place {
                id,
                slot,
                order: &order,
                more: &more,
            };
            push_qemu(args, disk, &place);
        }
    }
    Ok(())
}

fn push_qemu(args: &mut Arguments, disk: &QemuDisk, place: &Place) {
    let path = comma_safe(&disk.image);
    let (id, format) = (place.id, disk.format);
    let (aio, cache) = (disk.aio.name(), &disk.cache);
    // Discards are passed to the image, as Fathom and qemu-storage-daemon do.
    let access = match disk.read_only {
        true => "readonly=on",
        false => "discard=unmap",
    };
    args.option(
        "-drive",
        format!(
            "if=none,id={id}-file,format={format},file={path},aio={aio},cache={cache},{access}"
        ),
    );
    let (mut device, on_it) = disk.bus.devices(place, disk.queues);
    match disk.serving {
        Serving::Main => {}
        Serving::Thread { polling } => {
            push_thread(args, &format!("{id}-io"), polling);
            device.push_str(&format!(",iothread={id}-io"));
        }
        Serving::Mapped { threads, polling } => {
            let names: Vec<String> = (0..threads).map(|n| format!("{id}-io{n}")).collect();
            names
                .iter()
                .for_each(|name| push_thread(args, name, polling));
            device = mapped(&device, &names);
        }
    }
    for device in [Some(device), on_it].into_iter().flatten() {
        args.option("-device", device);
    }
}

fn push_thread(args: &mut Arguments, name: &str, polling: Option<u32>) {
    let polling = polling.map_or(String::new(), |ns| format!(",poll-max-ns={ns}"));
    args.option("-object", format!("iothread,id={name}{polling}"));
}

/// Converts a device's options to JSON, which is the only syntax that can distribute its queues to
/// threads. In JSON, switches are booleans and numbers are numbers, except for properties with
/// three values, which are strings.
fn mapped(device: &str, threads: &[String]) -> String {
    const WORDS: &[&str] = &["disable-legacy", "addr", "id", "drive"];
    let property = |text: &str| {
        let (name, value) = text.split_once('=').unwrap_or(("driver", text));
        let typed = match value {
            _ if WORDS.contains(&name) => json!(value),
            "on" => json!(true),
            "off" => json!(false),
            _ => value
                .parse::<u64>()
                .map_or(json!(value), |number| json!(number)),
        };
        (name.to_owned(), typed)
    };
    let mut object: Map<String, Value> = device.split(',').map(property).collect();
    let mapping = threads.iter().map(|name| json!({ "iothread": name }));
    object.insert("iothread-vq-mapping".into(), mapping.collect());
    Value::Object(object).to_string()
}

/// QEMU 9.2 added the option in milliseconds; later versions removed the one in seconds.
fn reconnect_option(version: (u32, u32)) -> &'static str {
    if version >= (9, 2) {
        ",reconnect-ms=200"
    } else {
        ",reconnect=1"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vhost_user_disk_has_its_slot_and_options() {
        let disk = Disk::vhost_user("d0", Path::new("/run/a,b")).with_queues(2);
        let mut args = Arguments::default();
        push(&mut args, &disk, 1, Boot::SeaBios).unwrap();
        let args: Vec<_> = args
            .0
            .iter()
            .map(|a| a.to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            args,
            [
                "-chardev",
                "socket,id=d0-socket,path=/run/a,,b",
                "-device",
                "vhost-user-blk-pci,chardev=d0-socket,id=d0,addr=5,bootindex=1,num-queues=2",
            ]
        );
    }

    #[test]
    fn a_disk_of_qemu_is_served_as_asked() {
        let disk = QemuDisk {
            serving: Serving::Thread { polling: Some(0) },
            queues: Some(1),
            aio: Aio::Native,
            cache: "none".into(),
            ..QemuDisk::read_only(Path::new("/i"))
        };
        let mut args = Arguments::default();
        let disk = Disk::qemu("d", disk).with_property("ioeventfd=off");
        push(&mut args, &disk, 0, Boot::Kernel).unwrap();
        let args = args
            .0
            .join(std::ffi::OsStr::new(" "))
            .into_string()
            .unwrap();
        assert_eq!(
            args,
            "-drive if=none,id=d-file,format=raw,file=/i,aio=native,cache=none,readonly=on \
             -object iothread,id=d-io,poll-max-ns=0 \
             -device virtio-blk-pci,drive=d-file,id=d,addr=4,ioeventfd=off,num-queues=1,iothread=d-io"
        );
    }

    #[test]
    fn every_bus_has_its_devices() {
        let said = |bus| {
            let disk = QemuDisk {
                bus,
                format: Format::Qcow2,
                queues: Some(2),
                ..QemuDisk::read_only(Path::new("/i"))
            };
            let mut args = Arguments::default();
            let disk = Disk::qemu("d", disk);
            push(&mut args, &disk, 1, Boot::Kernel).unwrap();
            let mut args = args.0.into_iter().map(|arg| arg.into_string().unwrap());
            let drive =
                "if=none,id=d-file,format=qcow2,file=/i,aio=threads,cache=writeback,readonly=on";
            assert_eq!(args.nth(1).unwrap(), drive);
            (disk.address(1), args.collect::<Vec<_>>().join(" "))
        };
        let own = |devices: &str| ("05.0".to_owned(), devices.to_owned());
        assert_eq!(
            said(Bus::VirtioScsi),
            own("-device virtio-scsi-pci,id=d-bus,addr=5,num_queues=2 \
                 -device scsi-hd,drive=d-file,id=d,bus=d-bus.0")
        );
        assert_eq!(
            said(Bus::Ahci),
            own("-device ich9-ahci,id=d-bus,addr=5 -device ide-hd,drive=d-file,id=d,bus=d-bus.0")
        );
        assert_eq!(
            said(Bus::Nvme),
            own("-device nvme,drive=d-file,id=d,addr=5,serial=d,max_ioqpairs=2")
        );
        // The machine has an IDE controller of its own.
        let (address, devices) = said(Bus::Ide);
        assert_eq!(address, "01.1");
        assert_eq!(devices, "-device ide-hd,drive=d-file,id=d,bus=ide.0");
    }

    #[test]
    fn queues_are_spread_over_threads_by_json() {
        let threads = ["a".to_owned(), "b".to_owned()];
        let device =
            "virtio-blk-pci,drive=d-file,id=7,addr=4,disable-legacy=on,ioeventfd=on,num-queues=2";
        let said: Value = serde_json::from_str(&mapped(device, &threads)).unwrap();
        let wanted = json!({
            "driver": "virtio-blk-pci", "drive": "d-file", "id": "7", "addr": "4",
            "disable-legacy": "on", "ioeventfd": true, "num-queues": 2,
            "iothread-vq-mapping": [{"iothread": "a"}, {"iothread": "b"}],
        });
        assert_eq!(said, wanted);
    }

    #[test]
    fn reconnecting_is_spelt_as_the_version_wants() {
        assert_eq!(reconnect_option((7, 2)), ",reconnect=1");
        assert_eq!(reconnect_option((10, 0)), ",reconnect-ms=200");
    }
}
