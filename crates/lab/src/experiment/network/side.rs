//! Runs scripts on each of two connected sides: in a namespace of this machine, in a container, or
//! in a guest.

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

/// Time limit of small scripts.
pub const SHORT: Duration = Duration::from_secs(60);
/// Time limit in addition to the runtime: an emulated guest is slow to begin and to end.
pub const PATIENCE: Duration = Duration::from_secs(120);
const SENDER: &str = "10.0.0.1";
const RECEIVER: &str = "10.0.0.2";
/// Addresses in QEMU's user-mode network: the guest, and the host as the guest sees it.
const USER_GUEST: &str = "10.0.2.15";
const USER_HOST: &str = "10.0.2.2";

/// Both sides, and the receiver's address for the sender.
pub struct Pair {
    // Fields are dropped in order: the sides before the bridge that connects them.
    pub sender: Side,
    pub receiver: Side,
    pub address: &'static str,
    _bridge: Bridge,
}

/// A side, which is killed on drop. The side's network exists until then.
pub enum Side {
    Bare(Bare),
    Container(Container),
    Guest(Box<Guest>),
}

impl Pair {
    /// Starts both sides and connects them.
    ///
    /// # Errors
    /// If a side does not start (with its last output), or the network cannot be created.
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

    /// Sends a number of packets, slowly.
    ///
    /// # Errors
    /// If no packets are received.
    pub fn send_some(&mut self, packets: u64) -> Result<()> {
        self.receiver.check(&iperf3::listen(), SHORT)?;
        let script = iperf3::send_some(self.address, packets);
        let printed = self.sender.check(&script, PATIENCE)?;
        iperf3::parse(&printed, Test::Packets).map(drop)
    }

    /// Powers both sides off, and waits for their end.
    ///
    /// # Errors
    /// If a side does not end, or fails.
    pub fn end(self) -> Result<()> {
        self.sender.end()?;
        self.receiver.end()
    }
}

impl Side {
    /// Starts a side behind a port of the bridge.
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

    /// Starts a side whose programs run on this machine, in a namespace.
    fn bare(namespace: &Namespace) -> Result<Side> {
        let _inside = namespace.enter()?;
        Bare::start(None, None).map(Side::Bare)
    }

    /// Runs a shell script and returns its output. Each command must succeed (`set -e`).
    ///
    /// # Errors
    /// If the agent does not respond, or the script fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match self {
            Side::Bare(bare) => bare.hosted.check(script, timeout),
            Side::Container(container) => container.hosted.check(script, timeout),
            Side::Guest(guest) => guest.check(script, timeout),
        }
    }

    /// Returns the ID of the side's process on this machine. All its descendants belong to the
    /// side.
    pub fn pid(&self) -> u32 {
        match self {
            Side::Bare(bare) => bare.hosted.pid(),
            Side::Container(container) => container.hosted.pid(),
            Side::Guest(guest) => guest.pid(),
        }
    }

    /// Whether the side is a guest, which has counters for its own CPUs.
    pub fn is_guest(&self) -> bool {
        matches!(self, Side::Guest(_))
    }

    /// Returns the processes to observe from outside that exist already.
    ///
    /// For a receiver, these are iperf3 and waiting shells. For a sender, whose iperf3 has not
    /// started yet, they only serve to find its control group.
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

/// Boots a guest with a network card. `backend` is a value of QEMU's option `-netdev`.
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
            // Both sides need different MAC addresses; `last` is a number below 100.
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
