//! Boots guests and runs scripts and workloads in them. The lab builds a small Linux guest from the
//! host's kernel, modules, busybox and fio, and boots it in QEMU. Fathom or another server serves
//! the guest's disks.
//!
//! The lab knows servers only as processes with a socket. The lab depends on no crate of the data
//! plane, so it measures the program that users run.

mod agent;
pub mod attach;
mod base64;
mod bed;
pub mod boot_image;
mod console;
mod control_groups;
mod cpio;
mod data_port;
mod disk_image;
pub mod environment;
mod error;
pub mod evidence;
pub mod experiment;
mod guest;
mod host;
mod initramfs;
mod kernel;
mod libraries;
mod lines;
mod machine;
mod mount_table;
mod page_cache;
mod partitions;
mod perf;
mod process;
mod process_tree;
mod qmp;
mod restore_settings;
pub mod scratch;
pub mod server;
mod shell;
mod tools;
pub mod tracers;
mod vcpu_watchdog;
mod words;
pub mod work;
pub mod workload;

pub use agent::Output;
pub use bed::{KvmHost, instance};
pub use console::Console;
pub use error::{Error, Result, Tail};
pub use guest::Guest;
pub use host::{Accelerator, program, qemu_version, run};
pub use kernel::Kernel;
pub use machine::{Aio, Attach, Boot, Bus, Disk, Format, MAX_DISKS, Machine, QemuDisk, Serving};
pub use process::Process;
pub use qmp::Qmp;
pub use restore_settings::restore_all_settings;
pub use server::Server;
