//! A virtual machine, and the QEMU command line that starts it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod board;
mod bus;
mod disk;
mod file_system;

pub use board::{Board, Firmware};
pub use bus::Bus;
pub use disk::{Aio, Attach, Disk, Format, QemuDisk, Serving};
pub use file_system::FileSystem;

use crate::error::{Error, Result};
use crate::host::{self, Accelerator};
use crate::kernel::Kernel;

/// PCI slots of the machine's devices. Slot 0 is the host bridge, slot 1 the ISA bridge.
pub(crate) const AGENT_SLOT: u8 = 2;
pub(crate) const TOOLS_SLOT: u8 = 3;
/// Maximum number of disks on the machine's only PCI bus.
pub const MAX_DISKS: usize = 28;

/// The way in which QEMU boots a machine.
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

/// A virtual machine to start.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Number of vCPUs.
    pub cpus: u32,
    /// Guest memory in MiB, shared with vhost-user servers.
    pub memory_mib: u32,
    /// Whether to use this machine's huge pages, of which enough must be free. If `None`, the bed
    /// decides.
    pub huge_pages: Option<bool>,
    /// Whether the memory is private: no vhost-user server can access it, and the kernel may merge
    /// its pages with other machines' pages (KSM).
    pub mergeable: bool,
    /// Disks in PCI order.
    pub disks: Vec<Disk>,
    /// QEMU's machine type.
    pub board: Board,
    /// The way in which the machine boots.
    pub boot: Boot,
    /// Firmware that starts the lab's kernel with [`Boot::Kernel`]. If `None`, the board's own.
    pub firmware: Option<Firmware>,
    /// Kernel of the guest. If `None`, [`Kernel::find`] chooses it.
    pub kernel: Option<Kernel>,
    /// Whether to attach the tools disk, which has fio and mkfs.
    pub tools: bool,
    /// Whether the tools disk also has perf.
    pub profiler: bool,
    /// Whether to start as the destination of a migration, which waits for `migrate-incoming`.
    pub incoming: bool,
    /// Id of the disk whose file system becomes the guest's root. After the lab's init, the guest
    /// runs the disk's /sbin/init.
    pub root: Option<String>,
    /// Additional kernel modules.
    pub modules: Vec<String>,
    /// Programs of the host to copy into the guest's /bin, with their libraries.
    pub programs: Vec<PathBuf>,
    /// Additional properties of the CPU model, such as `x2apic=off`.
    pub cpu: Vec<String>,
    /// Accelerator of the guest. If `None`, the best one that this machine supports.
    pub accelerator: Option<Accelerator>,
    /// Additional words for the kernel command line. `lab_...=` become variables of the init
    /// process.
    pub append: Vec<String>,
    /// Additional arguments for QEMU.
    pub extra: Vec<String>,
    /// Timeout for a boot. Emulated boots take seconds, and longer on a busy machine.
    pub patience: Duration,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            cpus: 1,
            memory_mib: 512,
            huge_pages: None,
            mergeable: false,
            disks: Vec::new(),
            board: Board::Pc,
            boot: Boot::default(),
            firmware: None,
            kernel: None,
            tools: true,
            profiler: false,
            incoming: false,
            root: None,
            modules: Vec::new(),
            programs: Vec::new(),
            cpu: Vec::new(),
            accelerator: None,
            append: Vec::new(),
            extra: Vec::new(),
            patience: Duration::from_secs(180),
        }
    }
}

/// Paths of the files of one running machine.
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

    /// Returns the path of a second monitor, for programs that inspect this QEMU from outside.
    pub fn monitor(&self) -> PathBuf {
        self.dir.join("monitor")
    }

    pub fn agent(&self) -> PathBuf {
        self.dir.join("agent")
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    pub fn signal(&self) -> PathBuf {
        self.dir.join("signal")
    }

    fn nvram(&self) -> PathBuf {
        self.dir.join("nvram")
    }
}

/// QEMU arguments under construction: pairs of `-option value`.
#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn option(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

impl Machine {
    /// Returns QEMU's arguments. Copies the firmware variables into the machine's directory.
    pub(crate) fn arguments(&self, files: &Files) -> Result<Vec<OsString>> {
        let ide = self.disks.iter().filter(|disk| disk.bus() == Bus::Ide);
        if ide.count() > 1 {
            return Err(Error::Protocol("a machine has at most one IDE disk".into()));
        }
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
            disk::push(&mut args, disk, index, self.boot)?;
        }
        self.push_boot(&mut args, files)?;
        if self.incoming {
            args.option("-incoming", "defer");
        }
        args.0.extend(self.extra.iter().map(OsString::from));
        let mut all = args.0;
        for index in 1..all.len() {
            if all[index - 1] == "-device" {
                all[index] = self.board.device(std::mem::take(&mut all[index]));
            }
        }
        Ok(all)
    }

    /// Returns the guest's accelerator.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator.unwrap_or_else(Accelerator::detect)
    }

    fn push_base(&self, args: &mut Arguments) {
        let accel = self.accelerator();
        args.0
            .extend(["-nodefaults", "-no-user-config"].map(OsString::from));
        args.option("-display", "none");
        args.option("-accel", accel.name());
        let more = self.cpu.iter().map(|more| format!(",{more}"));
        let cpu = format!("{}{}", accel.cpu_model(), more.collect::<String>());
        args.option("-cpu", cpu);
        args.option("-machine", self.board.option());
        let size = self.memory_mib;
        let huge = if self.huge_pages == Some(true) {
            ",hugetlb=on,hugetlbsize=2M"
        } else {
            ""
        };
        // Shared, because a vhost-user server must access the guest's requests.
        let backend = match self.mergeable {
            true => "memory-backend-ram,merge=on".to_owned(),
            false => format!("memory-backend-memfd,share=on{huge}"),
        };
        args.option("-object", format!("{backend},id=memory,size={size}M"));
        args.option("-m", format!("{size}M"));
        args.option("-smp", self.cpus.to_string());
        args.option("-name", "fathom-lab,debug-threads=on");
    }

    fn push_boot(&self, args: &mut Arguments, files: &Files) -> Result<()> {
        match self.boot {
            Boot::Kernel => {
                let firmware = self.firmware.unwrap_or(self.board.firmware());
                if let Some(file) = firmware.file()? {
                    args.option("-bios", file);
                }
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

    /// Returns the command line of the lab's kernel, for every way of loading it. `lab_tools` and
    /// `lab_root` become variables of the init process.
    pub(crate) fn kernel_command_line(&self) -> String {
        let mut words = String::from("console=ttyS0 quiet panic=-1 mitigations=off no_timer_check");
        if self.tools {
            let _ = write!(words, " lab_tools={TOOLS_SLOT:02x}");
        }
        if let Some(slot) = self.root.as_ref().and_then(|id| self.slot_of(id)) {
            let _ = write!(words, " lab_root={slot:02x}");
        }
        if let Some(word) = self.board.kernel_word(self.accelerator()) {
            let _ = write!(words, " {word}");
        }
        let buses = { self.disks.iter() }.filter_map(|disk| disk.bus().kernel_word());
        for word in buses.chain(self.append.iter().map(String::as_str)) {
            let _ = write!(words, " {word}");
        }
        words
    }

    /// Returns the modules to load: the requested ones, those of the board and of the disks' buses.
    pub(crate) fn wanted_modules(&self) -> Vec<String> {
        let buses = self.disks.iter().flat_map(|disk| disk.bus().modules());
        let buses = buses.map(|&name| name.to_owned());
        let board = self.board.modules().iter().map(|&name| name.to_owned());
        self.modules
            .iter()
            .cloned()
            .chain(board)
            .chain(buses)
            .collect()
    }

    /// Returns the PCI slot of a disk, which is named by its id.
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
    for monitor in [files.qmp(), files.monitor()] {
        let path = comma_safe(&monitor);
        args.option("-qmp", format!("unix:{path},server=on,wait=off"));
    }
    args.option("-device", format!("virtio-serial-pci,addr={AGENT_SLOT:x}"));
    for (name, socket) in [
        ("agent", files.agent()),
        ("data", files.data()),
        ("signal", files.signal()),
    ] {
        let path = comma_safe(&socket);
        args.option(
            "-chardev",
            format!("socket,id={name},path={path},server=on,wait=off"),
        );
        args.option(
            "-device",
            format!("virtserialport,chardev={name},name=fathom.{name}"),
        );
    }
}

/// Doubles the commas in a path: in a QEMU option, a single comma ends the value.
pub(crate) fn comma_safe(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}
