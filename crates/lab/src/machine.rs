//! A virtual machine as QEMU's command line says it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::host::{self, Accelerator};

/// PCI slots of the machine: 0 is the host bridge, 1 the ISA bridge.
pub(crate) const AGENT_SLOT: u8 = 2;
pub(crate) const TOOLS_SLOT: u8 = 3;
const FIRST_DISK_SLOT: u8 = 4;
/// Disks that fit on the machine's one PCI bus.
pub const MAX_DISKS: usize = 28;

/// What QEMU starts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Boot {
    /// The lab's kernel and initramfs, loaded by QEMU.
    #[default]
    Kernel,
    /// The BIOS boots from the first disk.
    SeaBios,
    /// UEFI firmware boots from the first disk.
    Ovmf,
}

/// How the machine's QEMU reaches a disk.
#[derive(Debug, Clone)]
pub enum Attach {
    /// Served by another process over a vhost-user socket.
    VhostUser {
        /// The server's socket.
        socket: PathBuf,
        /// Request queues; QEMU chooses one per CPU when not given.
        queues: Option<u16>,
        /// Connect again when the server goes away.
        reconnect: bool,
    },
    /// A raw file opened by QEMU itself.
    Raw(PathBuf),
    /// A raw file served by QEMU, in the way that is to be measured.
    Qemu(QemuDisk),
}

/// How QEMU reads and writes an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    Threads,
    Native,
    IoUring,
}

impl Aio {
    /// The name in QEMU's options and in Fathom's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Native => "native",
            Self::IoUring => "io_uring",
        }
    }
}

/// A disk that QEMU itself serves.
#[derive(Debug, Clone)]
pub struct QemuDisk {
    /// The raw image.
    pub image: PathBuf,
    /// How QEMU reads and writes it.
    pub aio: Aio,
    /// QEMU's cache mode: `none`, `writeback`, ...
    pub cache: String,
    /// The guest cannot write.
    pub read_only: bool,
    /// Serve the disk in an I/O thread of its own, which polls for that many nanoseconds before
    /// it sleeps (QEMU's default with `None`); without, the main loop serves it.
    pub iothread: Option<Option<u32>>,
    /// Request queues; QEMU chooses one per CPU when not given.
    pub queues: Option<u16>,
}

impl QemuDisk {
    /// A disk of the main loop's that the guest cannot write.
    pub fn read_only(image: &Path) -> Self {
        Self {
            image: image.to_owned(),
            aio: Aio::Threads,
            cache: "writeback".into(),
            read_only: true,
            iothread: None,
            queues: None,
        }
    }
}

/// One disk of a machine.
#[derive(Debug, Clone)]
pub struct Disk {
    /// QEMU's id for the device.
    pub id: String,
    /// How QEMU reaches it.
    pub attach: Attach,
    /// More properties of the device, such as `disable-legacy=on`.
    pub properties: Vec<String>,
}

impl Disk {
    /// A vhost-user disk with as many queues as QEMU chooses, and no reconnecting.
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

    /// A disk that QEMU serves.
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

    /// Lets QEMU connect again when a vhost-user server goes away.
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

    /// The PCI slot of the `index`th disk.
    pub(crate) fn slot(index: usize) -> u8 {
        let index = u8::try_from(index).expect("the number of disks is checked");
        FIRST_DISK_SLOT + index
    }
}

/// A virtual machine to start.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Virtual CPUs.
    pub cpus: u32,
    /// Guest memory in MiB, shared with vhost-user servers.
    pub memory_mib: u32,
    /// Disks in PCI order.
    pub disks: Vec<Disk>,
    /// What starts first.
    pub boot: Boot,
    /// Attach the disk with fio and mkfs.
    pub tools: bool,
    /// Start as the destination of a migration, waiting for `migrate-incoming`.
    pub incoming: bool,
    /// The disk, by its id, whose file system becomes the guest's root; its /sbin/init goes on
    /// after the lab's.
    pub root: Option<String>,
    /// Modules to load beyond the lab's own.
    pub modules: Vec<String>,
    /// Programs of this machine to put into the guest's /bin, with their libraries. Not together
    /// with `tools`, which brings libraries of its own.
    pub programs: Vec<PathBuf>,
    /// How to run the guest's instructions; the best that this machine can when not given.
    pub accelerator: Option<Accelerator>,
    /// More words for the guest's kernel; `lab_...=` reach its first process as variables.
    pub append: Vec<String>,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            cpus: 1,
            memory_mib: 512,
            disks: Vec::new(),
            boot: Boot::default(),
            tools: true,
            incoming: false,
            root: None,
            modules: Vec::new(),
            programs: Vec::new(),
            accelerator: None,
            append: Vec::new(),
            extra: Vec::new(),
        }
    }
}

/// The files that belong to one running machine.
#[derive(Debug)]
pub(crate) struct Files<'a> {
    pub dir: &'a Path,
    pub kernel: &'a Path,
    pub initramfs: &'a Path,
    pub tools: Option<&'a Path>,
}

impl Files<'_> {
    pub fn qmp(&self) -> PathBuf {
        self.dir.join("qmp")
    }

    pub fn agent(&self) -> PathBuf {
        self.dir.join("agent")
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn nvram(&self) -> PathBuf {
        self.dir.join("nvram")
    }
}

/// Arguments being collected: `-option value` pairs.
#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn option(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

impl Machine {
    /// QEMU's arguments. Firmware variables are copied into the machine's directory.
    pub(crate) fn arguments(&self, files: &Files) -> Result<Vec<OsString>> {
        let mut args = Arguments::default();
        self.push_base(&mut args);
        push_channels(&mut args, files);
        if let Some(image) = files.tools {
            let path = comma_safe(image);
            args.option(
                "-drive",
                format!("if=none,id=tools,format=raw,readonly=on,file={path}"),
            );
            args.option(
                "-device",
                format!("virtio-blk-pci,drive=tools,addr={TOOLS_SLOT:x}"),
            );
        }
        for (index, disk) in self.disks.iter().enumerate() {
            push_disk(&mut args, disk, index, self.boot)?;
        }
        self.push_boot(&mut args, files)?;
        if self.incoming {
            args.option("-incoming", "defer");
        }
        args.0.extend(self.extra.iter().map(OsString::from));
        Ok(args.0)
    }

    /// How the guest's instructions are run.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator.unwrap_or_else(Accelerator::detect)
    }

    fn push_base(&self, args: &mut Arguments) {
        let accel = self.accelerator();
        args.0
            .extend(["-nodefaults", "-no-user-config"].map(OsString::from));
        args.option("-display", "none");
        args.option("-accel", accel.name());
        args.option("-cpu", accel.cpu_model());
        args.option(
            "-machine",
            "pc,memory-backend=memory,usb=off,vmport=off,graphics=off",
        );
        let size = self.memory_mib;
        // Shared, or a vhost-user server could not see the guest's requests.
        args.option(
            "-object",
            format!("memory-backend-memfd,id=memory,size={size}M,share=on"),
        );
        args.option("-m", format!("{size}M"));
        args.option("-smp", self.cpus.to_string());
        args.option("-name", "fathom-lab,debug-threads=on");
    }

    fn push_boot(&self, args: &mut Arguments, files: &Files) -> Result<()> {
        match self.boot {
            Boot::Kernel => {
                args.option("-kernel", files.kernel);
                args.option("-initrd", files.initramfs);
                args.option("-append", self.kernel_command_line());
            }
            Boot::SeaBios => {}
            Boot::Ovmf => {
                let code = host::first_file("OVMF firmware", OVMF_CODE)?;
                let vars = host::first_file("OVMF variables", OVMF_VARS)?;
                let nvram = files.nvram();
                std::fs::copy(&vars, &nvram).map_err(|source| crate::Error::Io {
                    what: format!("cannot copy {}", vars.display()),
                    source,
                })?;
                let code = comma_safe(&code);
                let nvram = comma_safe(&nvram);
                args.option(
                    "-drive",
                    format!("if=pflash,format=raw,readonly=on,file={code}"),
                );
                args.option("-drive", format!("if=pflash,format=raw,file={nvram}"));
            }
        }
        Ok(())
    }

    /// For the lab's kernel, however it is loaded. `lab_tools` and `lab_root` reach init as
    /// variables.
    pub(crate) fn kernel_command_line(&self) -> String {
        let mut words = String::from("console=ttyS0 quiet panic=-1 mitigations=off no_timer_check");
        if self.tools {
            let _ = write!(words, " lab_tools={TOOLS_SLOT:02x}");
        }
        if let Some(slot) = self.root.as_ref().and_then(|id| self.slot_of(id)) {
            let _ = write!(words, " lab_root={slot:02x}");
        }
        for word in &self.append {
            let _ = write!(words, " {word}");
        }
        words
    }

    /// The PCI slot of a disk, by its id.
    pub(crate) fn slot_of(&self, id: &str) -> Option<u8> {
        let index = self.disks.iter().position(|disk| disk.id == id)?;
        Some(Disk::slot(index))
    }
}

const OVMF_CODE: &[&str] = &[
    "/usr/share/OVMF/OVMF_CODE_4M.fd",
    "/usr/share/OVMF/OVMF_CODE.fd",
    "/usr/share/edk2/x64/OVMF_CODE.4m.fd",
    "/usr/share/edk2/ovmf/OVMF_CODE.fd",
];
const OVMF_VARS: &[&str] = &[
    "/usr/share/OVMF/OVMF_VARS_4M.fd",
    "/usr/share/OVMF/OVMF_VARS.fd",
    "/usr/share/edk2/x64/OVMF_VARS.4m.fd",
    "/usr/share/edk2/ovmf/OVMF_VARS.fd",
];

fn push_channels(args: &mut Arguments, files: &Files) {
    args.option("-chardev", "stdio,id=console,signal=off");
    args.option("-device", "isa-serial,chardev=console");
    args.option(
        "-qmp",
        format!("unix:{},server=on,wait=off", comma_safe(&files.qmp())),
    );
    let agent = comma_safe(&files.agent());
    args.option(
        "-chardev",
        format!("socket,id=agent,path={agent},server=on,wait=off"),
    );
    args.option("-device", format!("virtio-serial-pci,addr={AGENT_SLOT:x}"));
    args.option("-device", "virtserialport,chardev=agent,name=fathom.agent");
    let data = comma_safe(&files.data());
    args.option(
        "-chardev",
        format!("socket,id=data,path={data},server=on,wait=off"),
    );
    args.option("-device", "virtserialport,chardev=data,name=fathom.data");
}

fn push_disk(args: &mut Arguments, disk: &Disk, index: usize, boot: Boot) -> Result<()> {
    let id = &disk.id;
    let slot = Disk::slot(index);
    // With a kernel given, QEMU itself is the first in the boot order.
    let order = if boot == Boot::Kernel {
        String::new()
    } else {
        format!(",bootindex={index}")
    };
    let more: String = disk
        .properties
        .iter()
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
        Attach::Qemu(disk) => push_qemu_disk(args, disk, id, &place),
    }
    Ok(())
}

fn push_qemu_disk(args: &mut Arguments, disk: &QemuDisk, id: &str, place: &str) {
    let path = comma_safe(&disk.image);
    let (aio, cache) = (disk.aio.name(), &disk.cache);
    let read_only = if disk.read_only { ",readonly=on" } else { "" };
    args.option(
        "-drive",
        format!("if=none,id={id}-file,format=raw,file={path},aio={aio},cache={cache}{read_only}"),
    );
    let mut device = format!("virtio-blk-pci,drive={id}-file,{place}");
    if let Some(polling) = disk.iothread {
        let polling = polling.map_or(String::new(), |ns| format!(",poll-max-ns={ns}"));
        args.option("-object", format!("iothread,id={id}-io{polling}"));
        let _ = write!(device, ",iothread={id}-io");
    }
    if let Some(queues) = disk.queues {
        let _ = write!(device, ",num-queues={queues}");
    }
    args.option("-device", device);
}

/// QEMU 9.2 brought milliseconds; later ones dropped the seconds.
fn reconnect_option(version: (u32, u32)) -> &'static str {
    if version >= (9, 2) {
        ",reconnect-ms=200"
    } else {
        ",reconnect=1"
    }
}

/// In an option of QEMU a comma ends the value, unless doubled.
fn comma_safe(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vhost_user_disk_has_its_slot_and_options() {
        let disk = Disk::vhost_user("d0", Path::new("/run/a,b")).with_queues(2);
        let mut args = Arguments::default();
        push_disk(&mut args, &disk, 1, Boot::SeaBios).unwrap();
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
            iothread: Some(Some(0)),
            queues: Some(1),
            aio: Aio::Native,
            cache: "none".into(),
            ..QemuDisk::read_only(Path::new("/i"))
        };
        let mut args = Arguments::default();
        let disk = Disk::qemu("d", disk).with_property("ioeventfd=off");
        push_disk(&mut args, &disk, 0, Boot::Kernel).unwrap();
        let args = args
            .0
            .join(std::ffi::OsStr::new(" "))
            .into_string()
            .unwrap();
        assert_eq!(
            args,
            "-drive if=none,id=d-file,format=raw,file=/i,aio=native,cache=none,readonly=on \
             -object iothread,id=d-io,poll-max-ns=0 \
             -device virtio-blk-pci,drive=d-file,id=d,addr=4,ioeventfd=off,iothread=d-io,num-queues=1"
        );
    }

    #[test]
    fn reconnecting_is_spelt_as_the_version_wants() {
        assert_eq!(reconnect_option((7, 2)), ",reconnect=1");
        assert_eq!(reconnect_option((10, 0)), ",reconnect-ms=200");
    }
}
