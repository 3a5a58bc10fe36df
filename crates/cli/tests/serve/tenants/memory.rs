//! What a tenant that has a guest costs.

use super::{pid, socket, start};
use crate::driver::{Request, with_disk};
use crate::pools::memory;
use crate::support::short_dir;
use std::sync::Barrier;

/// The rings of one user's tenants share his limit of locked memory, with those of other tests.
const TENANTS: usize = 16;

/// In KiB, of each. (Of the program for tests each process has a MiB that the loader has written to; of the one that
/// users have, half of that.)
const BAR: u64 = 4352;

#[test]
fn a_tenant_that_is_idle_costs_little_memory() {
    let names: Vec<_> = (0..TENANTS).map(|number| format!("d{number}")).collect();
    let disks: Vec<_> = { names.iter() }
        .map(|name| (&**name, "null:1G", ""))
        .collect();
    let served = start(short_dir(), &disks);
    let (connected, over) = (Barrier::new(TENANTS + 1), Barrier::new(TENANTS + 1));
    let guest = |name: &str| {
        with_disk(&socket(&served, name), 1, |disk| {
            let (offset, len) = (4096, 4096);
            disk.all(&[Request::Read { offset, len }]);
            connected.wait();
            over.wait();
        });
    };
    let all: u64 = std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| guest(name));
        }
        connected.wait();
        let pids = names.iter().map(|name| pid(&served, name));
        let all = pids.map(|pid| memory(u32::try_from(pid).unwrap())).sum();
        over.wait();
        all
    });
    let each = all / TENANTS as u64;
    eprintln!("{TENANTS} tenants: {each} KiB each");
    assert!(each < BAR, "{each} KiB");
}
