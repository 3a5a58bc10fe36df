//! Paths of requests as call stacks: the callers of a device's driver for a block request or a
//! packet, in the guest and on the host, as in a blog post that compares such paths (Brendan Gregg,
//! "Virtualization Performance: Zones, KVM, Xen").

mod bed;
mod cell;
mod record;
mod trace;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::network::{Net, Network, Technology};
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::error::Result;
use cell::Cell;
use trace::Of;

pub struct Paths;

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "technology",
        "Technologies that make requests [default: bare, container, and kvm or tcg]",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter::new(
        "of",
        "Kind of request to follow",
        Kind::of::<Of>(Of::FORM),
        "block,packet",
    ),
    Parameter {
        about: "Server of a guest's disk",
        default: "qemu",
        ..shared::DISK
    },
    shared::aio("io_uring"),
    Parameter::new(
        "net",
        "Connection of a guest to the network",
        Kind::of::<Net>(Net::FORM),
        "tap",
    ),
    Parameter::new(
        "requests",
        "Number of requests to follow",
        Kind::Count {
            least: 10,
            most: 10_000,
        },
        "500",
    ),
];

impl Experiment for Paths {
    fn name(&self) -> &'static str {
        "path"
    }

    fn about(&self) -> &'static str {
        "Call stacks of a block request or a packet, from the program to the device"
    }

    fn description(&self) -> &'static str {
        "Some requests are made one after the other. Whenever a request reaches a device, \
         perf records its call stack, in the guest and on the host at the same time, each \
         with its own symbols. The report has a picture for each technology: the stacks \
         side by side, in the order of the request's path, and the events in between.\n\n\
         `block`: fio reads 4 KiB at random places with O_DIRECT. With `bare` fio reads a \
         file of this machine, in a container a loop device over the file, and in a guest \
         the disk that --disk serves from the file. `packet`: iperf3 sends UDP packets of \
         64 bytes, 2,000 per second, over the networks of the experiment `network`. The \
         recorded path is the sender's, up to the other side's port of the bridge.\n\n\
         A disk with a scheduler gets its requests from the scheduler, often in a kernel \
         thread. The path then has two stacks: up to the scheduler, and from there. \
         `SIDE.frames` is the number of kernel functions in the deepest stack of a side, \
         among the stacks of most requests. `SIDE.exits`, `.switches`, `.wake-ups` and \
         `.calls` are VM exits, context switches, wake-ups of threads and system calls per \
         request. These measures count the threads that carry requests: the program; QEMU and the \
         disk's server; in a guest, all programs. `request` is the mean time of a block \
         request for the program, and `SIDE.device` the part of it from the device's driver \
         until completion. Copies are not counted, because no event reports them.\n\n\
         perf finds callers by frame pointers. Kernels have frame pointers; most packaged \
         programs do not, and their stacks end early. perf itself takes time: do not \
         compare the figures with other experiments."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        match parameter.name {
            "technology" => Technology::usual(),
            _ => parameter.defaults(),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let perf = [Need::Program("perf"), Need::Root("tracing the kernel")];
        let needs = match cell.of {
            Of::Packet => Network.needs(&cell.network_settings())?,
            Of::Block => block_needs(cell.technology),
        };
        Ok([&perf[..], &needs].concat())
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(4);
        const GUEST: Duration = Duration::from_secs(20);
        Cell::new(settings).map_or(GUEST, |cell| match cell.technology.accelerator() {
            None => AROUND,
            Some(_) => GUEST,
        })
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Following {
            fathom: context.fathom.clone(),
        })
    }
}

fn block_needs(technology: Technology) -> Vec<Need> {
    let mut needs = vec![Need::Program("fio"), Need::Program("unshare")];
    match technology {
        Technology::Bare => {}
        Technology::Container => needs.extend([
            Need::Program("crun"),
            Need::Program("busybox"),
            Need::LoopDevices,
        ]),
        Technology::Kvm | Technology::Tcg => needs.extend(Need::GUEST),
    }
    if technology == Technology::Kvm {
        needs.push(Need::Kvm);
    }
    needs
}

struct Following {
    fathom: PathBuf,
}

impl Session for Following {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        Cell::new(settings)?.run(&self.fathom, folder, progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_technology_uses_is_needed() {
        let needs = |technology: &str, of: &str| {
            let settings = Settings::defaults(PARAMETERS)
                .with("technology", technology)
                .with("of", of);
            Paths.needs(&settings).unwrap()
        };
        assert!(!needs("bare", "block").contains(&Need::Kernel));
        assert!(needs("container", "block").contains(&Need::LoopDevices));
        assert!(needs("kvm", "block").contains(&Need::Kvm));
        assert!(needs("tcg", "packet").contains(&Need::Program("iperf3")));
        assert!(needs("bare", "packet").contains(&Need::Program("perf")));
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS).with("technology", "bare");
        Paths.check(&settings).unwrap();
        let packet = settings.with("of", "packet");
        Paths.check(&packet).unwrap();
        let vhost = Paths.check(&packet.with("net", "vhost"));
        let said = vhost.unwrap_err().to_string();
        assert!(said.contains("for guests, and not for bare"), "{said}");
    }
}
