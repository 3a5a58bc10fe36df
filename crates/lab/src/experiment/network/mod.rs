//! Networks of containers and virtual machines compared with that of the machine itself: throughput
//! and packets of a blog post that compares them (Brendan Gregg, "Virtualization Performance:
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
/// Maximum number of streams of iperf3.
const MOST_THREADS: u64 = 128;

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        TECHNOLOGY,
        "Kind of both sides [default: bare, container, and kvm or tcg]",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter::new(
        "test",
        "Tests: TCP throughput, or small UDP packets",
        Kind::of::<Test>(Test::FORM),
        "throughput,packets",
    ),
    Parameter::new(
        "threads",
        "Number of concurrent streams of iperf3, one thread each since version 3.16",
        shared::count(MOST_THREADS),
        "1,2,4,8",
    ),
    Parameter::new(
        "net",
        "Connection of guests; user: to the namespace of the guest's QEMU",
        Kind::of::<Net>(Net::FORM),
        "tap",
    ),
    Parameter {
        default: "5s",
        ..shared::RUNTIME
    },
    Parameter::new(
        "memory",
        "Memory of each guest [default: 256M], or limit of each container",
        Kind::Size {
            least: 64 << 20,
            most: 1 << 40,
        },
        "",
    ),
    Parameter::new(
        "cpus",
        "CPUs of each guest [default: 1], or limit of each container's CPU time",
        Kind::of::<Cpus>(Cpus::FORM),
        "",
    ),
];

words! {
    /// Kind of both sides.
    pub enum Technology {
        /// Programs on this machine, each in a network namespace of its own.
        Bare = "bare",
        /// Containers.
        Container = "container",
        /// Virtual machines with KVM.
        Kvm = "kvm",
        /// Virtual machines emulated by QEMU.
        Tcg = "tcg",
    }
}

words! {
    /// Backend of a guest's virtio-net.
    pub enum Net {
        /// A tap device on the bridge, which QEMU reads and writes.
        Tap = "tap",
        /// A tap device on the bridge, which the kernel reads and writes (vhost-net).
        Vhost = "vhost",
        /// QEMU's user-mode network. The other side is in the namespace of QEMU.
        User = "user",
    }
}

impl Technology {
    /// Returns the fastest kind of virtual machine on this machine.
    pub(super) fn machine() -> Technology {
        match Accelerator::detect() {
            Accelerator::Kvm => Technology::Kvm,
            Accelerator::Tcg => Technology::Tcg,
        }
    }

    /// Returns the technologies that are compared by default.
    pub(super) fn usual() -> Vec<String> {
        let all = [
            Technology::Bare,
            Technology::Container,
            Technology::machine(),
        ];
        all.map(|one| one.name().to_owned()).into()
    }

    /// Returns the accelerator of a virtual machine; `None` for other technologies.
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
        "Network throughput and packets between programs, containers, virtual machines"
    }

    fn description(&self) -> &'static str {
        "Two sides are connected by a bridge, in network namespaces of the run. The network \
         of this machine stays unmodified. iperf3 on one side sends to iperf3 on the other. \
         `throughput` sends TCP in writes of 128 KiB, as fast as possible. `packets` sends \
         UDP packets of 64 bytes, as many as possible. The congestion control is reno \
         everywhere, because every kernel has it.\n\n\
         Both sides are programs of this machine (`bare`, over veth), containers (crun, \
         over the same veth), or guests with virtio-net. A guest is connected by a tap \
         device (`--net tap`), by the kernel's vhost-net (`vhost`), or by QEMU's user-mode \
         network (`user`). With `user` the guest sends to a program in the namespace of its \
         QEMU, without the bridge.\n\n\
         `throughput` and `packets` count received data. `loss` is a percentage of the sent \
         packets. `sender.cpu-per-gb` and `receiver.cpu-per-gb` (or `-per-packet`) are the \
         time of this machine's CPUs that the processes of each side took: QEMU with its \
         guest, or iperf3. The kernel does a part of the receiver's work in the sender's \
         time. In `cpu.*` and similar measures, a request is a write or a packet.\n\n\
         The CPUs of guests are measured inside: in `guest.vcpu*` those of the sender come \
         first, then those of the receiver. --memory and --cpus are limits of containers, \
         and resources of guests; `bare` has no limits. iperf3 before 3.16 sends all \
         streams from one thread. When that thread has no CPU time left, more streams have \
         no effect, and the limiter is `load-thread`."
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
                needs.push(Need::Module("virtio_net"));
                if cell.net != Net::User {
                    needs.push(Need::Module("tun"));
                }
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

/// Each cell has new sides, so that no cell is affected by the kernel state of an earlier one.
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
        assert!(refused(&[("memory", "67108865")]).contains("whole number of MiB"));
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
