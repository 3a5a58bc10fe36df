//! A server that completes requests without I/O and polls its rings. This server shows the maximum
//! performance of the load generator. Usage: `ideal_server SOCKET [CPU]`, then `bench --vhost-user
//! SOCKET`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

#[path = "../tests/support/mod.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod support;

use support::{EVENT_IDX, INDIRECT, Serve, VERSION_1, Vring};

/// A disk of 1 TiB without contents.
struct Ideal;

/// Translates guest addresses in the only memory region.
struct View {
    base: *const u8,
    guest: u64,
    len: u64,
}

impl View {
    fn new(ring: &Vring) -> View {
        let guest = ring.memory.iter().next().expect("a region");
        View {
            base: guest.as_ptr(),
            guest: guest.start_addr().raw_value(),
            len: guest.len(),
        }
    }

    fn at<T>(&self, address: u64) -> *mut T {
        let offset = address - self.guest;
        assert!(offset + size_of::<T>() as u64 <= self.len);
        // SAFETY: inside the mapped region, as just checked.
        unsafe { self.base.add(offset as usize).cast_mut().cast() }
    }

    fn u16(&self, address: u64) -> &AtomicU16 {
        // SAFETY: mapped while `self` is used, and only accessed atomically.
        unsafe { AtomicU16::from_ptr(self.at(address)) }
    }

    fn u32(&self, address: u64) -> &AtomicU32 {
        // SAFETY: as `u16`.
        unsafe { AtomicU32::from_ptr(self.at(address)) }
    }

    fn u64(&self, address: u64) -> &AtomicU64 {
        // SAFETY: as `u16`.
        unsafe { AtomicU64::from_ptr(self.at(address)) }
    }

    fn u8(&self, address: u64) -> &AtomicU8 {
        // SAFETY: as `u16`.
        unsafe { AtomicU8::from_ptr(self.at(address)) }
    }
}

impl Serve for Ideal {
    fn offer(&self) -> (u64, u64) {
        (VERSION_1 | EVENT_IDX | INDIRECT, 1 << 31)
    }

    fn serve(&self, ring: Vring, stop: &AtomicBool) -> u16 {
        if let Some(cpu) = std::env::args().nth(2) {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu.parse().expect("a CPU"));
            rustix::thread::sched_setaffinity(None, &set).expect("pinning");
        }
        let view = View::new(&ring);
        let n = u64::from(ring.size);
        let (mut next, mut used) = (ring.base, ring.base);
        // Suppress kicks: the avail index never reaches this event.
        view.u16(ring.used + 4 + 8 * n)
            .store(ring.base.wrapping_sub(1), Ordering::Relaxed);
        while !stop.load(Ordering::Relaxed) {
            let avail = view.u16(ring.avail + 2).load(Ordering::Acquire);
            let old = used;
            while next != avail {
                let place = u64::from(next % ring.size);
                let head = view.u16(ring.avail + 4 + 2 * place).load(Ordering::Relaxed);
                complete(&view, &ring, head, used);
                next = next.wrapping_add(1);
                used = used.wrapping_add(1);
            }
            if used != old {
                view.u16(ring.used + 2).store(used, Ordering::Release);
                fence(Ordering::SeqCst);
                let event = view.u16(ring.avail + 4 + 2 * n).load(Ordering::Relaxed);
                if used.wrapping_sub(event).wrapping_sub(1) < used.wrapping_sub(old) {
                    support::call(&ring);
                }
                view.u16(ring.used + 4 + 8 * n)
                    .store(used.wrapping_sub(1), Ordering::Relaxed);
            }
        }
        next
    }
}

/// Reads the header and the table, like a real server, and reports success.
fn complete(view: &View, ring: &Vring, head: u16, used: u16) {
    let desc = ring.desc + 16 * u64::from(head);
    let table = view.u64(desc).load(Ordering::Relaxed);
    let entries = u64::from(view.u32(desc + 8).load(Ordering::Relaxed)) / 16;
    let header = view.u64(table).load(Ordering::Relaxed);
    std::hint::black_box(view.u64(header + 8).load(Ordering::Relaxed));
    let status = view.u64(table + 16 * (entries - 1)).load(Ordering::Relaxed);
    view.u8(status).store(0, Ordering::Relaxed);
    let place = ring.used + 4 + 8 * u64::from(used % ring.size);
    view.u32(place).store(u32::from(head), Ordering::Relaxed);
    view.u32(place + 4).store(1, Ordering::Relaxed);
}

fn main() {
    let Some(path) = std::env::args().nth(1).map(PathBuf::from) else {
        eprintln!("usage: ideal_server SOCKET [CPU]");
        std::process::exit(1);
    };
    let _ = std::fs::remove_file(&path);
    let _server = support::Server::start(&path, Arc::new(Ideal));
    loop {
        std::thread::park();
    }
}
