//! What a run of the scenario is asked to do.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::machine::Aio;
use crate::workload::{self, Limit, Rw};

/// What serves the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// `fathom serve`, over vhost-user.
    Fathom,
    /// QEMU's own virtio-blk, in an I/O thread.
    Qemu,
    /// qemu-storage-daemon, over vhost-user.
    Qsd,
}

impl Server {
    /// All of them.
    pub const ALL: [Server; 3] = [Server::Fathom, Server::Qemu, Server::Qsd];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Server::Fathom => "fathom",
            Server::Qemu => "qemu",
            Server::Qsd => "qsd",
        }
    }
}

/// Which way the guest reaches the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// virtio 1: doorbells in memory, taken by ioeventfd.
    #[default]
    Modern,
    /// virtio 0.9: one doorbell, an I/O port.
    Legacy,
    /// virtio 1, with every doorbell going through QEMU's user space.
    NoIoeventfd,
    /// virtio 1 without MSI-X: QEMU raises a pin of the IO-APIC for the disk.
    Intx,
}

impl Transport {
    /// All of them.
    pub const ALL: [Transport; 4] = [
        Transport::Modern,
        Transport::Legacy,
        Transport::NoIoeventfd,
        Transport::Intx,
    ];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Modern => "modern",
            Transport::Legacy => "legacy",
            Transport::NoIoeventfd => "no-ioeventfd",
            Transport::Intx => "intx",
        }
    }

    /// Properties of QEMU's device.
    pub(super) fn properties(self) -> &'static [&'static str] {
        match self {
            Transport::Modern => &[],
            Transport::Legacy => &["disable-modern=on", "disable-legacy=off"],
            Transport::NoIoeventfd => &["ioeventfd=off"],
            Transport::Intx => &["vectors=0"],
        }
    }
}

/// Where a known delay is put into every other request, to check the instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The guest's benchmark, before its call.
    Guest,
    /// Fathom's storage.
    Storage,
    /// Fathom's queue.
    Queue,
    /// Fathom's notification.
    Notify,
}

impl Place {
    /// All of them.
    pub const ALL: [Place; 4] = [Place::Guest, Place::Storage, Place::Queue, Place::Notify];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Place::Guest => "guest",
            Place::Storage => "storage",
            Place::Queue => "queue",
            Place::Notify => "notify",
        }
    }
}

/// A delay and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    pub place: Place,
    pub delay: Duration,
}

macro_rules! words {
    ($($name:ident),+) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> std::result::Result<$name, String> {
                let words = $name::ALL.map($name::name).join(", ");
                $name::ALL
                    .into_iter()
                    .find(|one| one.name() == text)
                    .ok_or_else(|| format!("'{text}' is none of {words}"))
            }
        }
    )+};
}
words!(Server, Transport, Place);

/// A run. [`Options::new`] is the wiki's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The program itself: it serves disks, and runs in the guest.
    pub fathom: PathBuf,
    /// The run directory to make.
    pub output: PathBuf,
    pub server: Server,
    /// How the server reads and writes the image.
    pub aio: Aio,
    pub transport: Transport,
    pub rw: Rw,
    pub block_size: u64,
    pub iodepth: u32,
    /// Request queues.
    pub queues: u16,
    /// Pairs of a traced and an untraced round.
    pub rounds: u32,
    /// How long a round is; chosen by the machine when not given.
    pub limit: Option<Limit>,
    /// Let the server poll.
    pub poll: bool,
    pub inject: Option<Injection>,
    /// Filters of Fathom's, as `fathom serve --filter` takes them.
    pub filters: Vec<String>,
    /// Bytes of the image that is made; chosen by the machine when not given.
    pub size: Option<u64>,
    /// Only the pairs: no host benchmark, no rounds of system calls and of QEMU's events.
    pub pairs_only: bool,
    /// This is the KVM host that an outer run has booted.
    pub is_nested: bool,
}

impl Options {
    /// The wiki's run with Fathom as the server.
    pub fn new(fathom: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Options {
        Options {
            fathom: fathom.into(),
            output: output.into(),
            server: Server::Fathom,
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
            is_nested: false,
        }
    }

    /// What can be said before anything is started.
    ///
    /// # Errors
    /// One line that says what does not go together.
    pub(super) fn check(&self) -> Result<()> {
        let bad = |reason: &str| Err(Error::Protocol(reason.to_owned()));
        if self.output.exists() {
            let path = self.output.clone();
            let reason = "it is there already; name another --output".into();
            return Err(Error::Unusable { path, reason });
        }
        if self.rounds == 0 || self.queues == 0 {
            return bad("--rounds and --queues are at least 1");
        }
        let place = self.inject.map(|injection| injection.place);
        if self.server != Server::Fathom && place.is_some_and(|place| place != Place::Guest) {
            return bad("only fathom delays in storage, queue and notify: --disk fathom");
        }
        if self.server != Server::Fathom && !self.filters.is_empty() {
            return bad("only fathom has filters: --disk fathom");
        }
        if self.server != Server::Qemu && self.transport == Transport::NoIoeventfd {
            return bad("vhost-user disks always have an ioeventfd: --disk qemu");
        }
        if self.queues > 1 && self.transport == Transport::Legacy {
            return bad("a legacy disk has one queue here: --queues 1");
        }
        Ok(self.workload("the guest's disk").check()?)
    }

    /// The benchmark on a file or device.
    pub(super) fn workload(&self, path: impl Into<PathBuf>) -> workload::Options {
        let mut workload = workload::Options::new(path)
            .with_rw(self.rw)
            .with_iodepth(self.iodepth)
            .with_limit(self.limit());
        workload.block_size = self.block_size;
        workload
    }

    /// How long a round is. Where everything is emulated a thousand operations take seconds.
    pub(super) fn limit(&self) -> Limit {
        let operations = if crate::environment::is_stretched() {
            1500
        } else {
            10_000
        };
        self.limit.unwrap_or(Limit::Operations(operations))
    }

    /// Bytes of the image.
    pub(super) fn size(&self) -> u64 {
        let mib = if crate::environment::is_stretched() {
            48
        } else {
            256
        };
        self.size.unwrap_or(mib << 20)
    }

    /// The arguments after `fathom lab run wiki` for the same run elsewhere.
    pub fn to_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut option = |name: &str, value: &dyn fmt::Display| {
            args.push(format!("--{name}={value}"));
        };
        option("output", &self.output.display());
        option("disk", &self.server);
        option("aio", &self.aio.name());
        option("transport", &self.transport);
        option("rw", &self.rw);
        option("bs", &self.block_size);
        option("iodepth", &self.iodepth);
        option("queues", &self.queues);
        option("rounds", &self.rounds);
        match self.limit {
            Some(Limit::Operations(count)) => option("count", &count),
            Some(Limit::Time(time)) => option("seconds", &time.as_secs()),
            None => {}
        }
        if let Some(Injection { place, delay }) = self.inject {
            option("inject", &format!("{place}={}us", delay.as_micros()));
        }
        for filter in &self.filters {
            option("filter", filter);
        }
        if let Some(size) = self.size {
            option("size", &size);
        }
        for (name, is_set) in [
            ("--poll", self.poll),
            ("--pairs-only", self.pairs_only),
            ("--nested", self.is_nested),
        ] {
            if is_set {
                args.push(name.to_owned());
            }
        }
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_written() {
        for place in Place::ALL {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        let error = "disk".parse::<Server>().unwrap_err();
        assert_eq!(error, "'disk' is none of fathom, qemu, qsd");
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let refusal = |change: fn(&mut Options)| {
            let mut options = Options::new("/bin/true", "/nonexistent/run");
            options.check().unwrap();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        assert!(refusal(|o| o.output = "/".into()).contains("--output"));
        assert!(refusal(|o| o.rounds = 0).contains("at least 1"));
        assert!(refusal(|o| o.block_size = 100).contains("multiples of 512"));
        assert!(refusal(|o| o.transport = Transport::NoIoeventfd).contains("--disk qemu"));
        let storage = |o: &mut Options| {
            let delay = Duration::from_millis(1);
            o.inject = Some(Injection {
                place: Place::Storage,
                delay,
            });
            o.server = Server::Qsd;
        };
        assert!(refusal(storage).contains("--disk fathom"));
        let filtered = |o: &mut Options| {
            o.filters.push("delay".into());
            o.server = Server::Qemu;
        };
        assert!(refusal(filtered).contains("--disk fathom"));
    }
}
