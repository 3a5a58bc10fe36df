//! A cell: checks that its settings go together, and derives the machine and the disk from them.

use std::path::PathBuf;

use super::load;
use super::parameters::{Cache, RAW, Scheduler, Storage};
use super::storage::{self, check_image, is_uri};
use crate::bed::DISK;
use crate::error::{Error, Result};
use crate::experiment::Settings;
use crate::host::Accelerator;
use crate::machine::{Aio, Bus, FileSystem, Format, Machine};
use crate::server::{Kind, Spec};
use crate::work::FioJob;

pub(super) struct Cell {
    pub bus: Bus,
    pub disk: Kind,
    pub format: Format,
    pub storage: Storage,
    pub host_scheduler: Option<Scheduler>,
    /// File system in the guest. `None`: the load uses the device itself.
    pub fs: Option<FileSystem>,
    pub image: Option<PathBuf>,
    pub size: u64,
    pub load: FioJob,
    aio: Aio,
    cache: Cache,
    guest_scheduler: Scheduler,
    has_barriers: bool,
    has_x2apic: bool,
    has_ioeventfd: bool,
    has_event_idx: bool,
    is_packed: bool,
    has_huge_pages: bool,
    iothreads: Option<u16>,
    queues: u16,
    accelerator: Option<Accelerator>,
    cpus: u32,
    may_overwrite: bool,
}

/// Mount point of the guest's file system.
const MOUNTED: &str = "/mnt/disk";
/// The load's file in the guest's file system.
const FILE: &str = "/mnt/disk/file";

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        let image = Some(settings.text("image")).filter(|path| !path.is_empty());
        Ok(Cell {
            bus: settings.word("bus")?,
            disk: settings.word("disk")?,
            format: settings.word("format")?,
            storage: settings.word("storage")?,
            host_scheduler: settings.chosen("host-scheduler")?,
            fs: match settings.text("fs") {
                RAW => None,
                _ => settings.word("fs").map(Some)?,
            },
            image: image.map(PathBuf::from),
            size: Settings::needed("size", settings.size("size")?)?,
            load: load::read(settings)?,
            aio: settings.word("aio")?,
            cache: settings.word("cache")?,
            guest_scheduler: settings.word("guest-scheduler")?,
            has_barriers: settings.is_on("barriers"),
            has_x2apic: settings.is_on("x2apic"),
            has_ioeventfd: settings.is_on("ioeventfd"),
            has_event_idx: settings.is_on("event-idx"),
            is_packed: settings.is_on("packed"),
            has_huge_pages: settings.is_on("huge-pages"),
            iothreads: settings.count("iothreads")?,
            queues: Settings::needed("queues", settings.count("queues")?)?,
            accelerator: settings.chosen("accelerator")?,
            cpus: Settings::needed("cpus", settings.count("cpus")?)?,
            may_overwrite: settings.is_on("overwrite"),
        })
    }

    /// Checks the settings before anything is run.
    pub fn check(&self) -> Result<()> {
        if let Some(reason) = self.contradiction() {
            return Err(Error::Protocol(reason));
        }
        self.disk.check(&self.spec())?;
        load::check(&self.load)?;
        if let Some(path) = &self.image {
            check_image(path)?;
        }
        match self.host_scheduler {
            Some(wanted) => storage::check_scheduler(self, wanted),
            None => Ok(()),
        }
    }

    /// Returns why some settings do not go together, or `None`.
    fn contradiction(&self) -> Option<String> {
        self.of_the_server()
            .or_else(|| self.of_the_device())
            .or_else(|| self.of_the_image())
            .or_else(|| self.of_the_guest())
    }

    fn of_the_server(&self) -> Option<String> {
        let (disk, cache) = (&self.disk, self.cache);
        let is_fathom = *disk == Kind::Fathom;
        match self.iothreads {
            _ if matches!(disk, Kind::Socket(_)) => {
                Some("--disk socket:PATH: the server's settings have to be known".into())
            }
            Some(_) if !is_fathom && *disk != Kind::QemuMapped => Some(format!(
                "--iothreads is for --disk fathom and qemu-mapped, not for {disk}"
            )),
            Some(threads) if *disk == Kind::QemuMapped && threads > self.queues => Some(format!(
                "--iothreads {threads}: no more than --queues {} have work",
                self.queues
            )),
            _ if is_fathom && matches!(cache, Cache::Directsync | Cache::Unsafe) => Some(format!(
                "--cache {cache}: fathom has none, writeback and writethrough"
            )),
            _ if self.aio == Aio::Native && !cache.is_direct() => Some(format!(
                "--aio native goes past the page cache: not with --cache {cache}"
            )),
            _ => None,
        }
    }

    fn of_the_device(&self) -> Option<String> {
        let (bus, disk, queues) = (self.bus, &self.disk, self.queues);
        let virtio = [
            ("ioeventfd off", !self.has_ioeventfd),
            ("event-idx off", !self.has_event_idx),
            ("packed on", self.is_packed),
        ];
        let changed = virtio.iter().find(|(_, is_changed)| *is_changed);
        match changed {
            Some((name, _)) if !bus.is_virtio() => {
                Some(format!("--{name}: only virtio has that, not --bus {bus}"))
            }
            _ if !self.has_ioeventfd && *disk != Kind::QemuMain => Some(format!(
                "--ioeventfd off: I/O threads and vhost-user servers need it; --disk qemu-main \
                 does not, {disk} does"
            )),
            _ if self.is_packed && !disk.is_in_qemu() && *disk != Kind::Fathom => Some(format!(
                "--packed on: {disk} has split rings only; fathom and QEMU's own disks have both"
            )),
            _ if queues > 1 && !bus.has_queues() => Some(format!("--bus {bus} has one queue")),
            _ if u32::from(queues) > self.cpus => Some(format!(
                "--queues {queues}: a guest uses no more than it has CPUs (--cpus {})",
                self.cpus
            )),
            _ => None,
        }
    }

    fn of_the_image(&self) -> Option<String> {
        let is_remote = self.image.as_deref().is_some_and(is_uri);
        let writes = !self.load.rw.is_read_only() || self.fs.is_some();
        match &self.image {
            Some(_) if writes && !self.may_overwrite => Some(
                "--image: this would destroy what is in it (--rw, --fs); --overwrite=on allows it"
                    .into(),
            ),
            _ if is_remote && (self.format != Format::Raw || self.storage != Storage::File) => {
                Some("--image: an NBD server's export is raw and no file".into())
            }
            _ if is_remote && self.disk == Kind::Qsd => {
                Some("--image: an NBD server's export is for QEMU and fathom, not for qsd".into())
            }
            _ if is_remote && self.host_scheduler.is_some() => {
                Some("--host-scheduler: below an NBD server's export there is no device".into())
            }
            _ if self.storage == Storage::Loop && self.format != Format::Raw => Some(format!(
                "--storage loop: with --format raw, not {}",
                self.format
            )),
            _ => None,
        }
    }

    fn of_the_guest(&self) -> Option<String> {
        let (least, can_do_without) = match self.fs {
            None => (0, false),
            Some(FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2) => (16, true),
            Some(FileSystem::Btrfs) => (256, true),
            Some(FileSystem::Xfs) => (320, false),
        };
        let fs = self.fs.map_or(RAW, FileSystem::name);
        if self.size >> 20 < least {
            return Some(format!("--fs {fs} needs a --size of {least} MiB"));
        }
        (!self.has_barriers && !can_do_without).then(|| {
            format!("--barriers off: ext2 to ext4 and btrfs can do without, --fs {fs} cannot")
        })
    }

    /// Whether the host can run the same load as the guest: on a raw image that the host can
    /// access.
    pub fn has_bare(&self) -> bool {
        self.format == Format::Raw && !self.image.as_deref().is_some_and(is_uri)
    }

    /// The disk, without its image.
    pub fn spec(&self) -> Spec<'static> {
        let properties = [
            ("ioeventfd=off", !self.has_ioeventfd),
            ("event_idx=off", !self.has_event_idx),
            ("packed=on", self.is_packed),
        ];
        let properties = properties.iter().filter(|(_, is_set)| *is_set);
        let offers_packed = self.is_packed && self.disk == Kind::Fathom;
        Spec {
            name: DISK,
            format: self.format,
            bus: self.bus,
            aio: self.aio,
            cache: self.cache.name(),
            queues: self.queues,
            threads: self.iothreads,
            options: Vec::from_iter(offers_packed.then(|| "--packed".to_owned())),
            properties: properties.map(|(text, _)| (*text).to_owned()).collect(),
            ..Spec::default()
        }
    }

    /// The guest, without its disk.
    pub fn machine(&self) -> Machine {
        let x2apic = (!self.has_x2apic).then(|| "x2apic=off".to_owned());
        Machine {
            cpus: self.cpus,
            huge_pages: Some(self.has_huge_pages),
            modules: self.modules().map(str::to_owned).collect(),
            cpu: x2apic.into_iter().collect(),
            accelerator: self.accelerator,
            ..Machine::default()
        }
    }

    /// Returns modules of the guest's kernel, in addition to the drivers of its disk.
    pub fn modules(&self) -> impl Iterator<Item = &'static str> + use<> {
        let fs = self.fs.and_then(FileSystem::module);
        let scheduler = match self.guest_scheduler {
            Scheduler::None => None,
            Scheduler::MqDeadline => Some("mq_deadline"),
            Scheduler::Kyber => Some("kyber_iosched"),
            Scheduler::Bfq => Some("bfq"),
        };
        fs.into_iter().chain(scheduler)
    }

    /// Returns a script that sets the disk's scheduler in the guest, and makes a file system with a
    /// file of half the disk's size.
    pub fn preparation(&self, device: &str) -> String {
        let name = device.trim_start_matches("/dev/");
        let scheduler = self.guest_scheduler;
        let set = format!("echo {scheduler} >/sys/block/{name}/queue/scheduler\n");
        let Some(fs) = self.fs else {
            return set;
        };
        let barriers = match (self.has_barriers, fs) {
            (true, _) => "",
            (false, FileSystem::Btrfs) => "-o nobarrier",
            (false, _) => "-o barrier=0",
        };
        // No work may be left for the measured window.
        let make = fs.make(device, false);
        // (--image may be smaller than --size. The file `size` counts sectors of 512 bytes.)
        let half = format!("$(($(cat /sys/block/{name}/size) * 256))");
        format!(
            "{set}{make}\nmkdir -p {MOUNTED}\n\
             mount -t {fs} {barriers} {device} {MOUNTED}\n\
             fio --name=fill --filename={FILE} --rw=write --bs=1M --size={half} --ioengine=psync \
             --direct=1 --output=/tmp/fill.log || {{ cat /tmp/fill.log; exit 1; }}\nsync"
        )
    }

    /// Returns the device or file that the load uses.
    pub fn target<'a>(&self, device: &'a str) -> &'a str {
        match self.fs {
            None => device,
            Some(_) => FILE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parameters::PARAMETERS;
    use super::*;

    fn cell(settings: &[(&str, &str)]) -> Cell {
        let defaults = Settings::defaults(PARAMETERS);
        let all = settings.iter();
        let all = all.fold(defaults, |all, (name, value)| all.with(name, value));
        Cell::new(&all).unwrap()
    }

    #[test]
    fn what_does_not_go_together_is_said_in_one_line() {
        for (settings, words) in [
            (
                &[("bus", "ide"), ("disk", "fathom")][..],
                "vhost-user disks are virtio-blk",
            ),
            (
                &[("bus", "nvme"), ("disk", "qemu")],
                "only with --disk qemu-main",
            ),
            (
                &[("bus", "ide"), ("queues", "2"), ("cpus", "2")],
                "--bus ide has one queue",
            ),
            (&[("queues", "2")], "--cpus 1"),
            (
                &[("bus", "ahci"), ("packed", "on")],
                "--packed on: only virtio",
            ),
            (&[("disk", "qsd"), ("packed", "on")], "split rings only"),
            (
                &[("disk", "qemu"), ("ioeventfd", "off")],
                "--disk qemu-main",
            ),
            (
                &[("aio", "native"), ("cache", "writeback")],
                "not with --cache writeback",
            ),
            (
                &[("disk", "fathom"), ("cache", "unsafe")],
                "fathom has none",
            ),
            (
                &[("disk", "qsd"), ("cache", "writethrough")],
                "none and writeback",
            ),
            (&[("iothreads", "2")], "not for qemu-main"),
            (
                &[("disk", "qemu-mapped"), ("iothreads", "2")],
                "no more than --queues 1",
            ),
            (&[("disk", "socket:/s")], "have to be known"),
            (&[("storage", "loop"), ("format", "qed")], "not qed"),
            (&[("barriers", "off")], "--fs raw cannot"),
            (&[("fs", "xfs"), ("barriers", "off")], "--fs xfs cannot"),
            (&[("fs", "xfs"), ("size", "64M")], "320 MiB"),
            (&[("image", "/i"), ("rw", "write")], "--overwrite=on allows"),
            (&[("image", "/i"), ("fs", "ext4")], "--overwrite=on allows"),
            (&[("image", "/nowhere")], "--image /nowhere"),
            (&[("image", "nbd://h"), ("disk", "qsd")], "not for qsd"),
            (&[("image", "nbd://h"), ("storage", "loop")], "no file"),
            (&[("rw", "read"), ("fsync", "1")], "--fsync"),
        ] {
            let error = cell(settings).check().unwrap_err().to_string();
            assert!(
                error.contains(words) && !error.contains('\n'),
                "{settings:?}: {error}"
            );
        }
        for settings in [
            &[][..],
            &[("bus", "ide")],
            &[("bus", "virtio-scsi"), ("disk", "qemu"), ("packed", "on")],
            &[("disk", "fathom"), ("format", "qcow2"), ("iothreads", "4")],
            &[("aio", "native"), ("cache", "directsync")],
            &[("image", "nbd+unix:///?socket=/s"), ("bus", "nvme")],
            &[
                ("fs", "btrfs"),
                ("barriers", "off"),
                ("guest-scheduler", "bfq"),
            ],
        ] {
            let checked = cell(settings).check();
            assert!(checked.is_ok(), "{settings:?}: {checked:?}");
        }
    }

    #[test]
    fn a_file_system_is_made_with_its_file_and_without_barriers() {
        let script = cell(&[("fs", "ext4"), ("size", "64M"), ("barriers", "off")]);
        let script = script.preparation("/dev/sda");
        for words in [
            "echo none >/sys/block/sda/queue/scheduler",
            "/usr/bin/mkfs.ext4 -q -F -t ext4 -E nodiscard,lazy_itable_init=0",
            "mount -t ext4 -o barrier=0 /dev/sda /mnt/disk",
            "--filename=/mnt/disk/file --rw=write --bs=1M",
            "--size=$(($(cat /sys/block/sda/size) * 256))",
        ] {
            assert!(script.contains(words), "{words}: {script}");
        }
        let raw = cell(&[("guest-scheduler", "kyber")]);
        assert_eq!(
            raw.preparation("/dev/nvme0n1"),
            "echo kyber >/sys/block/nvme0n1/queue/scheduler\n"
        );
        assert_eq!(raw.target("/dev/nvme0n1"), "/dev/nvme0n1");
        assert_eq!(raw.modules().collect::<Vec<_>>(), ["kyber_iosched"]);
    }

    #[test]
    fn settings_reach_the_machine_and_the_disk() {
        let cell = cell(&[
            ("x2apic", "off"),
            ("ioeventfd", "off"),
            ("event-idx", "off"),
            ("packed", "on"),
            ("accelerator", "tcg"),
            ("cpus", "2"),
        ]);
        let machine = cell.machine();
        assert_eq!(
            (machine.cpus, &machine.cpu[..]),
            (2, &["x2apic=off".to_owned()][..])
        );
        assert_eq!(machine.accelerator, Some(Accelerator::Tcg));
        let spec = cell.spec();
        assert_eq!(
            spec.properties,
            ["ioeventfd=off", "event_idx=off", "packed=on"]
        );
        assert!(spec.options.is_empty(), "QEMU's own disk");
    }

    #[test]
    fn packed_rings_need_an_option_of_fathom() {
        let cell = cell(&[("disk", "fathom"), ("packed", "on")]);
        assert!(cell.check().is_ok());
        let spec = cell.spec();
        assert_eq!(spec.options, ["--packed"]);
        assert_eq!(spec.properties, ["packed=on"]);
    }
}
