//! Beds: the program that makes a cell's requests, and the processes that carry them.

use std::time::Duration;

use fathom_run::folded::{QEMU, SERVER};

use crate::bed::GuestBed;
use crate::bed::instance::bare::Bare;
use crate::bed::instance::container::{self, Container};
use crate::bed::instance::{Cache, Given};
use crate::error::Result;
use crate::experiment::network::{self, Pair, Side, Technology};
use crate::guest::Guest;
use crate::host;
use crate::machine::Machine;
use crate::server;
use crate::work::{AROUND_FIO, Shape, Worked, fio_script};

use super::trace::READ;

const SHORT: Duration = Duration::from_secs(60);
/// A single request in flight.
const ONE: Shape = Shape {
    threads: 1,
    depth: 1,
};

/// A bed, which is killed on drop.
pub enum Bed {
    Bare(Bare),
    Container(Container),
    Guest(GuestBed),
    Network(Pair),
}

impl Bed {
    /// Starts a bed in which a program reads an image.
    ///
    /// # Errors
    /// If the bed does not start, with its last output.
    pub fn block(
        technology: Technology,
        (kind, spec): (&server::Kind, &server::Spec),
        progress: &mut dyn FnMut(&str),
    ) -> Result<Bed> {
        match technology {
            Technology::Bare => Bare::start(Some(Given::File(spec.image)), None).map(Bed::Bare),
            Technology::Container => Container::start(&container::Spec {
                disk: Some(Given::Device(spec.image, Cache::None)),
                memory: None,
                cpus: None,
                programs: &[host::program("fio")?],
                shares_network: false,
            })
            .map(Bed::Container),
            Technology::Kvm | Technology::Tcg => {
                let machine = Machine {
                    profiler: true,
                    accelerator: technology.accelerator(),
                    ..Machine::default()
                };
                GuestBed::boot(machine, kind, spec, progress).map(Bed::Guest)
            }
        }
    }

    /// Starts a sender and a receiver of packets.
    ///
    /// # Errors
    /// If a side does not start, or the network cannot be created.
    pub fn network(cell: &network::Cell) -> Result<Bed> {
        Pair::start(cell).map(Bed::Network)
    }

    /// Makes a number of requests. Returns the mean time of a request in nanoseconds, if known.
    ///
    /// # Errors
    /// If requests fail, or take too long.
    pub fn work(&mut self, requests: u64) -> Result<Option<f64>> {
        let script = |file: &str| {
            fio_script(&format!(
                "--name=path --filename={file} --rw=randread --bs={READ} --direct=1 \
                 --ioengine=psync --number_ios={requests} --norandommap --thread \
                 --output-format=json"
            ))
        };
        let printed = match self {
            Bed::Network(pair) => return pair.send_some(requests).map(|()| None),
            Bed::Bare(bare) => bare.hosted.check(&script(&bare.disk), AROUND_FIO)?,
            Bed::Container(container) => {
                let script = script(container.disk);
                container.hosted.check(&script, AROUND_FIO)?
            }
            Bed::Guest(bed) => bed.guest.check(&script(&bed.device), AROUND_FIO)?,
        };
        let worked = Worked::of_fio(&printed, ONE)?;
        Ok(Some(worked.load.mean_ns))
    }

    /// Returns the guest that makes the requests, if a guest makes them.
    pub fn guest(&mut self) -> Option<&mut Guest> {
        match self {
            Bed::Guest(bed) => Some(&mut bed.guest),
            Bed::Network(Pair {
                sender: Side::Guest(guest),
                ..
            }) => Some(guest),
            _ => None,
        }
    }

    /// Returns the numbers of the guest's disk, as in events of the guest's kernel, and its name.
    ///
    /// # Errors
    /// If the guest does not respond.
    pub fn disk_in_guest(&mut self) -> Result<Option<(String, String)>> {
        let Bed::Guest(bed) = self else {
            return Ok(None);
        };
        let name = bed.device.trim_start_matches("/dev/").to_owned();
        let numbers = bed
            .guest
            .check(&format!("cat /sys/block/{name}/dev"), SHORT)?;
        Ok(Some((numbers.trim().replace(':', ","), name)))
    }

    /// Returns the processes of this machine that carry requests, each with a prefix for the names
    /// of its threads.
    pub fn carriers(&mut self) -> Vec<(u32, &'static str)> {
        match self {
            Bed::Bare(bare) => vec![(bare.hosted.pid(), "")],
            Bed::Container(container) => vec![(container.hosted.pid(), "")],
            Bed::Guest(bed) => {
                let server = bed.server.as_mut();
                let server = server.map(|server| (server.process().pid(), SERVER));
                std::iter::once((bed.guest.pid(), QEMU))
                    .chain(server)
                    .collect()
            }
            Bed::Network(pair) => {
                let prefix = if pair.sender.is_guest() { QEMU } else { "" };
                vec![(pair.sender.pid(), prefix)]
            }
        }
    }

    /// Powers the bed off, and waits for its end.
    ///
    /// # Errors
    /// If the bed does not end, or fails.
    pub fn end(self) -> Result<()> {
        match self {
            Bed::Bare(bare) => bare.hosted.end(),
            Bed::Container(container) => container.end(),
            Bed::Guest(bed) => bed.end().map(drop),
            Bed::Network(pair) => pair.end(),
        }
    }
}
