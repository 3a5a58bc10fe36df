//! One of the two that are connected: something that runs scripts, in a namespace of this machine's,
//! in a container or in a guest.

use std::time::Duration;

use super::iperf3::{self, Test};
use super::namespace::{Bridge, Namespace};
use super::{Cell, Net, Technology};
use crate::bed::instance::bare::Bare;
use crate::bed::instance::container::Container;
use crate::error::Result;
use crate::evidence::{Kind, Watched};
use crate::guest::Guest;
use crate::host::{self, Accelerator};
use crate::machine::Machine;
use crate::process_tree;

/// Of small scripts.
pub const SHORT: Duration = Duration::from_secs(60);
/// Beyond the runtime: an emulated guest takes its time to begin, and to count to the end.
pub const PATIENCE: Duration = Duration::from_secs(120);
const SENDER: &str = "10.0.0.1";
const RECEIVER: &str = "10.0.0.2";
/// In QEMU's user-mode network: a guest, and what it is in for it.
const USER_GUEST: &str = "10.0.2.15";
const USER_HOST: &str = "10.0.2.2";

/// Both, and where the receiver is for the sender.
pub struct Pair {
    // Fields are dropped in order: sides go before what connects them.
    pub sender: Side,
    pub receiver: Side,
    pub address: &'static str,
    _bridge: Bridge,
}

/// It is killed on drop. Its network is there for as long as it is.
pub enum Side {
    Bare(Bare),
    Container(Container),
    Guest(Box<Guest>),
}

impl Pair {
    /// Starts both and connects them.
    ///
    /// # Errors
    /// When one does not come up, with its last words, or the network cannot be made.
    pub fn start(cell: &Cell) -> Result<Pair> {
        let bridge = Bridge::new()?;
        let (sender, receiver, address) = match (cell.technology.accelerator(), cell.net) {
            (Some(accelerator), Net::User) => {
                let sender = boot(cell, accelerator, &bridge.0, "user", USER_GUEST)?;
                (sender, Side::bare(&bridge.0)?, USER_HOST)
            }
            _ => {
                let sender = Side::at(cell, &bridge, "port1", SENDER)?;
                let receiver = Side::at(cell, &bridge, "port2", RECEIVER)?;
                (sender, receiver, RECEIVER)
            }
        };
        Ok(Pair {
            sender,
            receiver,
            address,
            _bridge: bridge,
        })
    }

    /// Sends so many packets, slowly.
    ///
    /// # Errors
    /// When they do not come through.
    pub fn send_some(&mut self, packets: u64) -> Result<()> {
        self.receiver.check(&iperf3::listen(), SHORT)?;
        let script = iperf3::send_some(self.address, packets);
        let printed = self.sender.check(&script, PATIENCE)?;
        iperf3::parse(&printed, Test::Packets).map(drop)
    }

    /// Powers both off, and waits for their end.
    ///
    /// # Errors
    /// When one does not end, or ends with a failure.
    pub fn end(self) -> Result<()> {
        self.sender.end()?;
        self.receiver.end()
    }
}

impl Side {
    /// One behind a port of the bridge.
    fn at(cell: &Cell, bridge: &Bridge, port: &str, address: &str) -> Result<Side> {
        if let Some(accelerator) = cell.technology.accelerator() {
            bridge.tap(port)?;
            let vhost = if cell.net == Net::Vhost { "on" } else { "off" };
            let backend = format!("tap,ifname={port},script=no,downscript=no,vhost={vhost}");
            return boot(cell, accelerator, &bridge.0, &backend, address);
        }
        let namespace = Namespace::new()?;
        bridge.connect(port, &namespace, &format!("{address}/24"))?;
        match cell.technology {
            Technology::Container => {
                let programs = [host::program("iperf3")?];
                let _inside = namespace.enter()?;
                Container::start(&cell.container(&programs)).map(Side::Container)
            }
            _ => Side::bare(&namespace),
        }
    }

    /// This machine's own programs in a namespace.
    fn bare(namespace: &Namespace) -> Result<Side> {
        let _inside = namespace.enter()?;
        Bare::start(None, None).map(Side::Bare)
    }

    /// Runs a shell script that must succeed (each of its commands: `set -e`) and returns what it
    /// printed.
    ///
    /// # Errors
    /// When the agent does not answer, or the script fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match self {
            Side::Bare(bare) => bare.hosted.check(script, timeout),
            Side::Container(container) => container.hosted.check(script, timeout),
            Side::Guest(guest) => guest.check(script, timeout),
        }
    }

    /// The process on this machine that it is, with all below it.
    pub fn pid(&self) -> u32 {
        match self {
            Side::Bare(bare) => bare.hosted.pid(),
            Side::Container(container) => container.hosted.pid(),
            Side::Guest(guest) => guest.pid(),
        }
    }

    /// Whether it counts what its own CPUs do.
    pub fn is_guest(&self) -> bool {
        matches!(self, Side::Guest(_))
    }

    /// What to look at from outside: what is there by now. Of a receiver that is iperf3, beside
    /// shells that wait; of a sender, which has not begun, it is for its control group.
    pub fn watched(&self) -> Vec<Watched> {
        let kind = match self {
            Side::Guest(_) => Kind::Qemu,
            Side::Bare(_) | Side::Container(_) => Kind::Server,
        };
        let all = process_tree::below(self.pid()).into_iter();
        all.map(|pid| Watched::new(pid, kind)).collect()
    }

    fn end(self) -> Result<()> {
        match self {
            Side::Bare(bare) => bare.hosted.end(),
            Side::Container(container) => container.end(),
            Side::Guest(mut guest) => guest.power_off(),
        }
    }
}

/// Boots a guest whose network card is what QEMU's option `-netdev` says.
fn boot(
    cell: &Cell,
    accelerator: Accelerator,
    namespace: &Namespace,
    backend: &str,
    address: &str,
) -> Result<Side> {
    let last = address.rsplit('.').next().unwrap_or_default();
    let machine = Machine {
        cpus: cell.vcpus(),
        memory_mib: cell.memory_mib(),
        tools: cell.profiler,
        profiler: cell.profiler,
        accelerator: Some(accelerator),
        modules: vec!["virtio_net".into()],
        programs: vec![host::program("iperf3")?],
        extra: [
            "-netdev".into(),
            format!("{backend},id=net"),
            "-device".into(),
            // Two that had the same address would not hear each other; last is a number below 100.
            format!("virtio-net-pci,netdev=net,mac=52:54:00:00:00:{last:0>2},romfile="),
        ]
        .into(),
        ..Machine::default()
    };
    let mut guest = {
        let _inside = namespace.enter()?;
        Guest::boot(&machine)?
    };
    let script = format!("ip address add {address}/24 dev eth0\nip link set eth0 up");
    guest.check(&script, SHORT)?;
    Ok(Side::Guest(Box::new(guest)))
}
