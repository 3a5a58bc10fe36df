//! What the network of a container and of a virtual machine takes beside that of the machine itself:
//! throughput and packets of a post that compares them (Brendan Gregg, "Virtualization Performance:
//! Zones, KVM, Xen").

mod cell;
mod iperf3;
mod namespace;
mod side;

use std::path::Path;
use std::time::Duration;

use fathom_run::Beside;

use super::shared::{self, Cpus};
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield};
use crate::error::Result;
use crate::host::Accelerator;
use crate::words::words;
use iperf3::Test;

pub(super) use cell::Cell;
pub(super) use side::{Pair, Side};

pub struct Network;

const TECHNOLOGY: &str = "technology";
/// iperf3's own limit.
const MOST_THREADS: u64 = 128;

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        TECHNOLOGY,
        "What both sides are; bare, container and the better virtual machine, if not given",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter::new(
        "test",
        "What is sent",
        Kind::of::<Test>(Test::FORM),
        "throughput,packets",
    ),
    Parameter::new(
        "threads",
        "Streams that iperf3 sends at the same time: from version 3.16 on by a thread each",
        shared::count(MOST_THREADS),
        "1,2,4,8",
    ),
    Parameter::new(
        "net",
        "How guests are connected; user: a guest with its QEMU's machine",
        Kind::of::<Net>(Net::FORM),
        "tap",
    ),
    Parameter {
        default: "5s",
        ..shared::RUNTIME
    },
    Parameter::new(
        "memory",
        "Each guest's (256M if empty), or each container's limit",
        Kind::Size {
            least: 64 << 20,
            most: 1 << 40,
        },
        "",
    ),
    Parameter::new(
        "cpus",
        "Each guest's (1 if empty), or each container's limit of CPU time",
        Kind::of::<Cpus>(Cpus::FORM),
        "",
    ),
];

words! {
    /// What both sides are.
    pub enum Technology {
        /// Programs of this machine, each with a network of its own.
        Bare = "bare",
        /// Containers.
        Container = "container",
        /// Virtual machines, by hardware.
        Kvm = "kvm",
        /// Virtual machines that QEMU emulates.
        Tcg = "tcg",
    }
}

words! {
    /// What a guest's virtio-net is behind.
    pub enum Net {
        /// A tap device at the bridge, which QEMU reads and writes.
        Tap = "tap",
        /// The same, read and written by the kernel (vhost-net).
        Vhost = "vhost",
        /// QEMU's user-mode network: the other side is where QEMU is.
        User = "user",
    }
}

impl Technology {
    /// The virtual machine that this machine can run best.
    pub(super) fn machine() -> Technology {
        match Accelerator::detect() {
            Accelerator::Kvm => Technology::Kvm,
            Accelerator::Tcg => Technology::Tcg,
        }
    }

    /// Those that are set side by side if nobody says which.
    pub(super) fn usual() -> Vec<String> {
        let all = [
            Technology::Bare,
            Technology::Container,
            Technology::machine(),
        ];
        all.map(|one| one.name().to_owned()).into()
    }

    /// Of a virtual machine.
    pub(super) fn accelerator(self) -> Option<Accelerator> {
        match self {
            Technology::Bare | Technology::Container => None,
            Technology::Kvm => Some(Accelerator::Kvm),
            Technology::Tcg => Some(Accelerator::Tcg),
        }
    }
}

impl Experiment for Network {
    fn name(&self) -> &'static str {
        "network"
    }

    fn about(&self) -> &'static str {
        "Network throughput and packets between two programs, two containers, two virtual machines"
    }

    fn description(&self) -> &'static str {
        "Two sides are connected by a bridge, in network namespaces of the run's own: nothing of this \
         machine's network is touched, and nothing is left of it. iperf3 on one side sends to iperf3 \
         on the other. `throughput`: TCP, as much as goes through, in writes of 128 KiB. `packets`: \
         UDP, as many packets of 64 bytes as go through. Congestion control is reno \
         everywhere, which no kernel lacks.\n\nBoth sides are programs of this machine (`bare`, by veth), containers (the \
         same veth, in crun's container), or guests with virtio-net: behind a tap device (`--net \
         tap`), with the kernel's vhost-net (`vhost`), or in QEMU's user-mode network (`user`), where \
         a guest sends to a program that is where its QEMU is, past the bridge.\n\n`throughput` and \
         `packets` are what was received, `loss` is in percent of what was sent. \
         `sender.cpu-per-gb` and `receiver.cpu-per-gb` (or `-per-packet`) are what each side's \
         processes took of this machine's CPUs: QEMU with its guest, or iperf3. The kernel does a \
         part of the receiver's work on the sender's time. A request, in `cpu.*` and the like, is a \
         write or a packet.\n\nGuests' CPUs are counted from inside: of `guest.vcpu*` the sender's are \
         first, then the receiver's. --memory and --cpus limit containers, and are what guests have; \
         `bare` has no limits. Older iperf3 (before 3.16) sends all streams from one thread: \
         when that is full, more streams bring nothing, and the limiter is `load-thread`."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn beside(&self) -> Option<Beside> {
        Some(Beside::of(
            TECHNOLOGY,
            &[("throughput", "MB/s"), ("packets", "packets/s")],
        ))
    }

    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        match parameter.name {
            TECHNOLOGY => Technology::usual(),
            _ => parameter.defaults(),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let mut needs = vec![
            Need::Root("a network of its own"),
            Need::Program("ip"),
            Need::Program("iperf3"),
            Need::Program("unshare"),
            Need::Module("bridge"),
        ];
        match cell.technology {
            Technology::Bare => needs.push(Need::Module("veth")),
            Technology::Container => needs.extend([
                Need::Module("veth"),
                Need::Program("crun"),
                Need::Program("busybox"),
            ]),
            Technology::Kvm | Technology::Tcg => {
                needs.extend(Need::GUEST);
                needs.extend([Need::Module("virtio_net"), Need::Module("tun")]);
            }
        }
        if cell.technology == Technology::Kvm {
            needs.push(Need::Kvm);
        }
        if cell.net == Net::Vhost {
            needs.extend([Need::Module("vhost_net"), Need::VhostNet]);
        }
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(1);
        const GUESTS: Duration = Duration::from_secs(10);
        Cell::new(settings).map_or(GUESTS, |cell| match cell.technology.accelerator() {
            None => AROUND + cell.runtime,
            Some(_) => GUESTS + cell.runtime,
        })
    }

    fn begin(&self, _context: &Context) -> Box<dyn Session> {
        Box::new(Trying)
    }
}

/// A cell has sides of its own: none begins with what another one has left in its kernel.
struct Trying;

impl Session for Trying {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        Cell::new(settings)?.run(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS);
        Network.check(&settings).unwrap();
        let refused = |values: &[(&str, &str)]| {
            let set = |settings: Settings, (name, value): &(&str, &str)| settings.with(name, value);
            let settings = values.iter().fold(settings.clone(), set);
            Network.check(&settings).unwrap_err().to_string()
        };
        let error = refused(&[("technology", "bare"), ("net", "user")]);
        assert!(error.contains("for guests, and not for bare"), "{error}");
        let error = refused(&[("technology", "tcg"), ("cpus", "0.5")]);
        assert!(error.contains("whole CPUs"), "{error}");
        assert!(refused(&[("memory", "67108865")]).contains("whole MiB"));
    }

    #[test]
    fn only_what_a_technology_uses_is_needed() {
        let needs = |technology: &str, net: &str| {
            let settings = Settings::defaults(PARAMETERS)
                .with("technology", technology)
                .with("net", net);
            Network.needs(&settings).unwrap()
        };
        assert!(!needs("bare", "tap").contains(&Need::Kernel));
        assert!(needs("container", "tap").contains(&Need::Program("crun")));
        assert!(needs("kvm", "tap").contains(&Need::Kvm));
        assert!(needs("tcg", "vhost").contains(&Need::VhostNet));
        assert!(!needs("tcg", "tap").contains(&Need::VhostNet));
    }
}
