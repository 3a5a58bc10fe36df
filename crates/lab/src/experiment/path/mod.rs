//! The way of a request as stacks: who has called whom when a block request or a packet is handed to
//! a device, in the guest and on the host, as in a post that compares such ways (Brendan Gregg,
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
        "What makes requests; if not given bare, container, the better virtual machine",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter::new(
        "of",
        "What is followed",
        Kind::of::<Of>(Of::FORM),
        "block,packet",
    ),
    Parameter {
        about: "Who serves a guest's disk",
        default: "qemu",
        ..shared::DISK
    },
    shared::aio("io_uring"),
    Parameter::new(
        "net",
        "How a guest is connected",
        Kind::of::<Net>(Net::FORM),
        "tap",
    ),
    Parameter::new(
        "requests",
        "How many are followed",
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
        "The way of a block request or a packet as stacks, from the program to the device"
    }

    fn description(&self) -> &'static str {
        "Some requests are made one after the other while perf records who has called whom whenever \
         one of them is handed to a device, in the guest and on the host at once, each by its own \
         symbols. The report has a picture for each technology: the stacks side by side, in the \
         order in which a request comes by, with what happened in between.\n\n\
         `block`: fio reads 4 KiB at random places, past the page cache. On `bare` that is a file of \
         this machine; in a container a loop device over it; in a guest the disk that --disk serves \
         from it. `packet`: iperf3 sends UDP packets of 64 bytes, 2,000 a second, over the networks \
         of the experiment `network`; what is followed is the sender's side, up to the other \
         side's port of the bridge.\n\n\
         A disk that has a scheduler gets requests from it, often by a thread of the kernel's: then \
         there are two stacks, up to the scheduler and from there. \
         `SIDE.frames` are the functions of the kernel in the deepest stack of a side, of those that \
         most requests have. `SIDE.exits`, `.switches`, `.wake-ups` and `.calls` are for each \
         request, from the first to the last of them: VM exits, context switches, wake-ups of \
         threads, system calls of those who carry requests (the program; QEMU and the disk's server; \
         in a guest, all of its programs). `request` is a block request's mean time as its maker sees \
         it, `SIDE.device` the part of it from the device's driver until its completion. Bytes \
         that are copied are not counted: no event tells of them.\n\n\
         Callers are found by frame pointers: programs that are built without them (most packaged \
         ones) have stacks that end early, and the kernel's are whole. perf costs time itself: the \
         figures of such a cell are not for comparisons with other experiments."
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
