//! Options of a cell.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use fathom_units::{parse_duration, short_duration, short_size};

use super::PARAMETERS;
use crate::environment::is_stretched;
use crate::error::{Error, Result};
use crate::experiment::{Context, Settings};
use crate::host::Accelerator;
use crate::machine::Aio;
use crate::server::Kind;
use crate::words::words;
use crate::workload::{self, Limit, Rw};

words! {
    /// How the guest accesses the server.
    #[derive(Default)]
    pub enum Transport {
        /// virtio 1: notifications are written to memory, and handled by ioeventfd.
        #[default]
        Modern = "modern",
        /// virtio 0.9: all notifications are written to one I/O port.
        Legacy = "legacy",
        /// virtio 1 without ioeventfd: QEMU's user space handles every notification.
        NoIoeventfd = "no-ioeventfd",
        /// virtio 1 without MSI-X: QEMU raises a pin of the IO-APIC for the disk.
        Intx = "intx",
    }
}

impl Transport {
    /// Returns properties of QEMU's device.
    pub(super) fn properties(self) -> &'static [&'static str] {
        match self {
            Transport::Modern => &[],
            Transport::Legacy => &["disable-modern=on", "disable-legacy=off"],
            Transport::NoIoeventfd => &["ioeventfd=off"],
            Transport::Intx => &["vectors=0"],
        }
    }
}

words! {
    /// The place where a known delay is added to every other request, to verify the measurement.
    pub enum Place {
        /// The guest's benchmark, before its call.
        Guest = "guest",
        /// Fathom's storage.
        Storage = "storage",
        /// Fathom's queue.
        Queue = "queue",
        /// Fathom's notification.
        Notify = "notify",
    }
}

/// A delay and the place where it is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Place where the delay is added.
    pub place: Place,
    /// Length of the delay, at most 10 s.
    pub delay: Duration,
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.place, short_duration(self.delay))
    }
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Injection, String> {
        let (place, delay) = text
            .split_once('=')
            .ok_or_else(|| format!("'{text}' is no place with a time, such as storage=100ms"))?;
        let (place, delay) = (place.parse()?, parse_duration(delay)?);
        if delay > LONGEST {
            return Err("a delay of more than 10s is not injected".into());
        }
        Ok(Injection { place, delay })
    }
}

/// Maximum injected delay.
const LONGEST: Duration = Duration::from_secs(10);

/// Options of a cell. [`Options::new`] returns those of the wiki.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Path of this program, which serves disks and also runs in the guest.
    pub fathom: PathBuf,
    /// The run directory to create.
    pub output: PathBuf,
    /// Server of the disk.
    pub server: Kind,
    /// How the server reads and writes the image.
    pub aio: Aio,
    /// How the guest accesses the server.
    pub transport: Transport,
    /// Operation and pattern of the guest's requests.
    pub rw: Rw,
    /// Size of a request in bytes.
    pub block_size: u64,
    /// Number of requests in flight.
    pub iodepth: u32,
    /// Number of request queues.
    pub queues: u16,
    /// Number of pairs of a traced and an untraced round.
    pub rounds: u32,
    /// Length of a round. `None`: chosen for this machine.
    pub limit: Option<Limit>,
    /// Whether the server polls.
    pub poll: bool,
    /// Known delay of every other request, to verify the measurement. `None`: no delay.
    pub inject: Option<Injection>,
    /// Filters on Fathom's disk, as in `fathom serve --filter`.
    pub filters: Vec<String>,
    /// Size of the new image in bytes. `None`: chosen for this machine.
    pub size: Option<u64>,
    /// Run only the pairs: no rounds on the host, of system calls, or of QEMU's events.
    pub pairs_only: bool,
}

impl Options {
    /// Returns the options of the wiki's experiment, with Fathom as the server.
    pub fn new(fathom: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Options {
        Options {
            fathom: fathom.into(),
            output: output.into(),
            server: Kind::Fathom,
            aio: Aio::IoUring,
            transport: Transport::Modern,
            rw: Rw::Read,
            block_size: 4096,
            iodepth: 1,
            queues: 1,
            rounds: 3,
            limit: None,
            poll: false,
            inject: None,
            filters: Vec::new(),
            size: None,
            pairs_only: false,
        }
    }

    /// Checks the options before anything is started.
    ///
    /// # Errors
    /// One line that names the options that do not go together.
    pub(super) fn check(&self) -> Result<()> {
        let bad = |reason: &str| Err(Error::Protocol(reason.to_owned()));
        if self.rounds == 0 || self.queues == 0 {
            return bad("--rounds and --queues are at least 1");
        }
        let place = self.inject.map(|injection| injection.place);
        if self.server != Kind::Fathom && place.is_some_and(|place| place != Place::Guest) {
            return bad("only fathom delays in storage, queue and notify: --disk fathom");
        }
        if self.server != Kind::Fathom && !self.filters.is_empty() {
            return bad("only fathom has filters: --disk fathom");
        }
        if matches!(self.server, Kind::Socket(_)) {
            return bad("the server's image has to be known: not with --disk socket:PATH");
        }
        if self.server == Kind::QemuNoIoeventfd {
            return bad("use --disk qemu-main --transport no-ioeventfd");
        }
        if !self.server.is_in_qemu() && self.transport == Transport::NoIoeventfd {
            return bad("vhost-user disks always have an ioeventfd: --disk qemu");
        }
        if self.queues > 1 && self.transport == Transport::Legacy {
            return bad("a legacy disk has one queue here: --queues 1");
        }
        Ok(self.workload("the guest's disk").check()?)
    }

    /// Returns the benchmark for a file or device.
    pub(super) fn workload(&self, path: impl Into<PathBuf>) -> workload::Options {
        let mut workload = workload::Options::new(path)
            .with_rw(self.rw)
            .with_iodepth(self.iodepth)
            .with_limit(self.limit());
        workload.block_size = self.block_size;
        workload
    }

    /// Returns the length of a round. In an emulated machine, a thousand operations take seconds.
    pub(super) fn limit(&self) -> Limit {
        let operations = if is_stretched() { 1500 } else { 10_000 };
        self.limit.unwrap_or(Limit::Operations(operations))
    }

    /// Returns the estimated time of a cell.
    pub(super) fn estimate(&self) -> Duration {
        let (around, request) = match is_stretched() || Accelerator::detect() == Accelerator::Tcg {
            true => (Duration::from_secs(90), Duration::from_millis(4)),
            false => (Duration::from_secs(20), Duration::from_micros(200)),
        };
        let rounds = if self.pairs_only { 2 } else { 4 } * self.rounds + 2;
        let round = match self.limit() {
            Limit::Operations(count) => request * u32::try_from(count).unwrap_or(u32::MAX),
            Limit::Time(time) => time,
        };
        around + round * rounds
    }

    /// Returns the size of the image in bytes.
    pub(super) fn size(&self) -> u64 {
        let mib = if is_stretched() { 48 } else { 256 };
        self.size.unwrap_or(mib << 20)
    }

    /// Converts a cell's settings; the breakdown is written to `output`.
    ///
    /// # Errors
    /// If the settings are not valid for this experiment.
    pub fn from_settings(settings: &Settings, context: &Context, output: &Path) -> Result<Options> {
        let count = settings.count("count")?.map(Limit::Operations);
        let seconds = settings.count("seconds")?.map(Duration::from_secs);
        if count.is_some() && seconds.is_some() {
            let what = "a round ends by --count or by --seconds, not by both";
            return Err(Error::Protocol(what.into()));
        }
        let inject = match settings.text("inject") {
            "" => None,
            _ => Some(settings.word("inject")?),
        };
        Ok(Options {
            fathom: context.fathom.clone(),
            output: output.to_owned(),
            server: settings.word("disk")?,
            aio: settings.word("aio")?,
            transport: settings.word("transport")?,
            rw: settings.word("rw")?,
            block_size: Settings::needed("bs", settings.size("bs")?)?,
            iodepth: Settings::needed("iodepth", settings.count("iodepth")?)?,
            queues: Settings::needed("queues", settings.count("queues")?)?,
            rounds: Settings::needed("rounds", settings.count("rounds")?)?,
            limit: count.or(seconds.map(Limit::Time)),
            poll: settings.is_on("poll"),
            inject,
            filters: settings.list("filter"),
            size: settings.size("size")?,
            pairs_only: settings.is_on("pairs-only"),
        })
    }

    /// Returns the settings with the same meaning.
    pub fn to_settings(&self) -> Settings {
        let switch = |is_on| if is_on { "on" } else { "off" };
        let (count, seconds) = match self.limit {
            Some(Limit::Operations(count)) => (count.to_string(), String::new()),
            Some(Limit::Time(time)) => (String::new(), time.as_secs().to_string()),
            None => (String::new(), String::new()),
        };
        Settings::defaults(PARAMETERS)
            .with("disk", &self.server)
            .with("aio", self.aio)
            .with("transport", self.transport)
            .with("rw", self.rw)
            .with("bs", short_size(self.block_size))
            .with("iodepth", self.iodepth)
            .with("queues", self.queues)
            .with("rounds", self.rounds)
            .with("count", count)
            .with("seconds", seconds)
            .with("poll", switch(self.poll))
            .with(
                "inject",
                self.inject.map_or(String::new(), |one| one.to_string()),
            )
            .with("filter", self.filters.join("\n"))
            .with("size", self.size.map_or(String::new(), short_size))
            .with("pairs-only", switch(self.pairs_only))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let refusal = |change: fn(&mut Options)| {
            let mut options = Options::new("/bin/true", "/nonexistent/run");
            options.check().unwrap();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        assert!(refusal(|o| o.server = Kind::Socket("/s".into())).contains("socket:PATH"));
        assert!(refusal(|o| o.rounds = 0).contains("at least 1"));
        assert!(refusal(|o| o.block_size = 100).contains("multiples of 512"));
        assert!(refusal(|o| o.transport = Transport::NoIoeventfd).contains("--disk qemu"));
        let storage = |o: &mut Options| {
            let delay = Duration::from_millis(1);
            o.inject = Some(Injection {
                place: Place::Storage,
                delay,
            });
            o.server = Kind::Qsd;
        };
        assert!(refusal(storage).contains("--disk fathom"));
        let filtered = |o: &mut Options| {
            o.filters.push("delay".into());
            o.server = Kind::Qemu;
        };
        assert!(refusal(filtered).contains("--disk fathom"));
    }

    /// The cell in the KVM host must be the one that was requested outside.
    #[test]
    fn options_survive_the_way_through_settings() {
        let context = Context {
            fathom: "/f".into(),
        };
        let there_and_back = |options: &Options| {
            let settings = options.to_settings();
            for parameter in PARAMETERS {
                let text = settings.text(parameter.name);
                assert_eq!(parameter.value(text).unwrap(), text, "{}", parameter.name);
            }
            Options::from_settings(&settings, &context, &options.output).unwrap()
        };
        let plain = Options::new("/f", "/var/tmp/run");
        assert_eq!(there_and_back(&plain), plain);
        assert_eq!(plain.to_settings(), Settings::defaults(PARAMETERS));
        let odd = Options {
            server: Kind::Qsd,
            aio: Aio::Native,
            transport: Transport::Legacy,
            rw: Rw::RandWrite,
            block_size: 8192,
            iodepth: 32,
            queues: 2,
            rounds: 7,
            limit: Some(Limit::Time(Duration::from_secs(9))),
            poll: true,
            inject: Some(Injection {
                place: Place::Notify,
                delay: Duration::from_micros(100_500),
            }),
            filters: vec!["delay:read=1ms,write=2ms".into(), "pause".into()],
            size: Some(1 << 30),
            pairs_only: true,
            ..plain
        };
        assert_eq!(there_and_back(&odd), odd);
        let counted = Options {
            limit: Some(Limit::Operations(77)),
            ..odd
        };
        assert_eq!(there_and_back(&counted), counted);
    }
}
