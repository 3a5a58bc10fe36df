//! Parameters and requirements that several experiments have in common.

use std::str::FromStr;
use std::time::Duration;

use super::{Kind, Need, Parameter};
use crate::bed::instance;
use crate::machine::{Aio, FileSystem};
use crate::server;
use crate::workload::Rw;

/// Any server, including one that runs already.
pub const DISK: Parameter = Parameter::new(
    "disk",
    "Server of the disk",
    Kind::of::<server::Kind>(server::FORM),
    "fathom",
);

pub const SERVE: Parameter = Parameter::new(
    "serve",
    "Further options of `fathom serve`, such as --serve=--poll=off",
    Kind::List,
    "",
);

pub const fn aio(default: &'static str) -> Parameter {
    Parameter::new(
        "aio",
        "Kind of the server's I/O on the image",
        Kind::of::<Aio>(Aio::FORM),
        default,
    )
}

/// An empty default leaves the size to the experiment.
pub const fn image_size(default: &'static str) -> Parameter {
    Parameter::new(
        "size",
        "Size of the new image",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        default,
    )
}

pub const FILE_SYSTEM: Parameter = Parameter::new(
    "fs",
    "File system in the guest",
    Kind::of::<FileSystem>(FileSystem::FORM),
    "ext4",
);

/// The maximum equals the maximum number of queues of a disk.
pub const fn vcpus(default: &'static str) -> Parameter {
    Parameter::new("vcpus", "Number of CPUs of the guest", count(64), default)
}

/// fio's patterns except trims: a load of only trims is not measured.
pub const RW: Parameter = Parameter::new(
    "rw",
    "Pattern of fio's requests in the guest",
    Kind::Word {
        form: "read, write, randread, randwrite, rw, randrw",
        check: |text| match text.parse()? {
            Rw::Trim | Rw::RandTrim => Err(format!("'{text}' neither reads nor writes")),
            _ => Ok(()),
        },
    },
    "randread",
);

pub const fn block_size(default: &'static str) -> Parameter {
    Parameter::new(
        "bs",
        "Size of a request",
        Kind::Size {
            least: 512,
            most: 64 << 20,
        },
        default,
    )
}

pub const THREADS: Parameter =
    Parameter::new("threads", "Number of threads of the load", count(1024), "1");

pub const DEPTH: Parameter =
    Parameter::new("iodepth", "Requests in flight per thread", count(1024), "1");

pub const RUNTIME: Parameter = Parameter::new(
    "runtime",
    "Time of the load",
    Kind::Time {
        least: Duration::from_secs(1),
        most: Duration::from_secs(3600),
    },
    "10s",
);

pub const fn count(most: u64) -> Kind {
    Kind::Count { least: 1, most }
}

/// Returns the requirements for running our small user space with a disk in this environment.
pub fn instance_needs(kind: instance::Kind) -> Vec<Need> {
    let on_this_kernel = |what| {
        let programs = ["busybox", "unshare", "losetup"].map(Need::Program);
        [&programs[..], &[Need::LoopDevices, Need::Root(what)]].concat()
    };
    match kind {
        instance::Kind::Bare => on_this_kernel("a loop device"),
        instance::Kind::Container => {
            [on_this_kernel("a container"), vec![Need::Program("crun")]].concat()
        }
        instance::Kind::Uml => vec![
            Need::Program("busybox"),
            Need::Program(instance::UML),
            Need::Program("unshare"),
            Need::UserModeLinux,
            Need::Root("user-mode Linux"),
        ],
        instance::Kind::Libguestfs => vec![
            Need::Program("busybox"),
            Need::Program("unshare"),
            Need::Root("the bed of libguestfs"),
        ],
        instance::Kind::Kvm => [&Need::GUEST[..], &[Need::Kvm]].concat(),
        instance::Kind::Tcg => Need::GUEST.into(),
    }
}

/// A share of CPU time, as a number of CPUs.
#[derive(Clone, Copy, Debug)]
pub struct Cpus(pub f64);

impl Cpus {
    /// The accepted values, for help.
    pub const FORM: &str = "0.01 to 1024";
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Cpus, String> {
        let cpus = text
            .parse()
            .ok()
            .filter(|cpus| (0.01..=1024.0).contains(cpus));
        cpus.map(Cpus)
            .ok_or_else(|| format!("'{text}' is not a number of CPUs from 0.01 to 1024"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_read_or_write() {
        assert_eq!(RW.value("readwrite").unwrap(), "readwrite");
        for bad in ["randtrim", "reed"] {
            let error = RW.value(bad).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--rw: '{bad}' ")), "{error}");
        }
    }
}
