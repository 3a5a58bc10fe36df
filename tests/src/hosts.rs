//! Two hosts: network namespaces of this machine that are connected by a virtual wire.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Programs started on a host see all files, but only the wire as their network.
///
/// Drop removes the namespaces.
#[derive(Debug)]
pub struct Hosts {
    number: u32,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Hosts {
    /// Creates the namespaces.
    ///
    /// # Panics
    /// If the process is not root.
    #[expect(clippy::new_without_default, reason = "it makes namespaces")]
    pub fn new() -> Self {
        let of_process = std::process::id() % 4000;
        let number = of_process * 8 + COUNT.fetch_add(1, Ordering::Relaxed) % 8;
        let hosts = Self { number };
        let [one, other] = [hosts.name(0), hosts.name(1)];
        ip(&["netns", "add", &one]);
        ip(&["netns", "add", &other]);
        let wire = format!("w{number}");
        ip(&[
            "link", "add", "name", &wire, "netns", &one, "type", "veth", "peer", "name", "wire",
            "netns", &other,
        ]);
        ip(&["-n", &one, "link", "set", &wire, "name", "wire"]);
        for (index, name) in [one, other].iter().enumerate() {
            let address = format!("{}/24", hosts.address(index));
            ip(&["-n", name, "address", "add", &address, "dev", "wire"]);
            ip(&["-n", name, "link", "set", "wire", "up"]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        hosts
    }

    fn name(&self, index: usize) -> String {
        format!("fathom-{}-{index}", self.number)
    }

    /// Returns the address at which the other host reaches this one.
    #[must_use]
    pub fn address(&self, index: usize) -> String {
        format!("10.77.0.{}", index + 1)
    }

    /// Runs `act` on a host. Programs that `act` starts stay on the host.
    ///
    /// # Panics
    /// If this thread cannot enter the namespace.
    pub fn on<T>(&self, index: usize, act: impl FnOnce() -> T) -> T {
        let open = |path: &Path| File::open(path).expect("a namespace");
        let back = open(Path::new("/proc/thread-self/ns/net"));
        let there = open(&Path::new("/run/netns").join(self.name(index)));
        let enter = |file: &File| {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(std::os::fd::AsFd::as_fd(file), kind).expect("it goes there");
        };
        enter(&there);
        let done = act();
        enter(&back);
        done
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for index in 0..2 {
            let delete = ["netns", "delete", &self.name(index)];
            let _ = Command::new("ip").args(delete).status();
        }
    }
}

fn ip(args: &[&str]) {
    let output = Command::new("ip")
        .args(args)
        .output()
        .expect("iproute2 is installed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "ip {args:?} (it needs root): {said}"
    );
}
