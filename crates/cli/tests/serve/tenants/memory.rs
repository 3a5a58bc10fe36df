//! Checks the memory that a tenant with a guest takes.

use super::{pid, socket, start};
use crate::driver::{Request, with_disk};
use crate::pools::memory;
use crate::support::short_dir;
use std::fs;
use std::sync::Barrier;

/// Number of tenants. The rings of all tenants share their user's limit of locked memory with those
/// of other tests.
const TENANTS: usize = 16;

/// Maximum memory of a tenant in KiB, without the pages that the loader has written to. (The size
/// of these pages depends on the size of the program: 1.4 MiB in the program for tests, half of
/// that in the program for users.)
const BAR: u64 = 3328;

/// Returns the size of the program's pages in which the loader has stored addresses, in KiB.
fn written_by_the_loader(pid: u32) -> u64 {
    let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let exe = exe.to_str().unwrap();
    let (mut is_program, mut sum) = (false, 0);
    for line in fs::read_to_string(format!("/proc/{pid}/smaps"))
        .unwrap()
        .lines()
    {
        let words = Vec::from_iter(line.split_whitespace());
        match words[..] {
            ["Private_Dirty:", number, "kB"] if is_program => sum += number.parse::<u64>().unwrap(),
            [range, _, _, _, _, ..] if range.contains('-') => is_program = line.ends_with(exe),
            _ => {}
        }
    }
    assert!(sum > 0, "{exe}: what is its own is not found");
    sum
}

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
        let pids = pids.map(|pid| u32::try_from(pid).unwrap());
        let all = pids
            .map(|pid| memory(pid) - written_by_the_loader(pid))
            .sum();
        over.wait();
        all
    });
    let each = all / TENANTS as u64;
    eprintln!("{TENANTS} tenants: {each} KiB each");
    assert!(each < BAR, "{each} KiB");
}
