//! Network namespaces of the run, separate from this machine's network. A namespace is removed with
//! the last process in it, so that nothing is left when the lab is killed.

use fathom_units::cause;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::thread;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::error::{Context, Result};
use crate::host;

/// The network namespace of the current thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace with a loopback device, and the devices that are added.
#[derive(Debug)]
pub struct Namespace(File);

/// Keeps the current thread in a namespace until drop. Processes that it starts stay there.
pub struct Inside(File);

impl Namespace {
    /// Creates a namespace.
    ///
    /// # Errors
    /// Without root privileges.
    pub fn new() -> Result<Namespace> {
        let made = thread::spawn(|| {
            // SAFETY: the flags do not include FILES, so all threads of the process share
            // descriptors.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open(OWN)
        });
        let made = made.join();
        let made = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let made = Namespace(made.context(|| "cannot make a network namespace".into())?);
        made.ip("link set lo up")?;
        Ok(made)
    }

    /// Moves the current thread into the namespace.
    ///
    /// # Errors
    /// Without root privileges.
    pub fn enter(&self) -> Result<Inside> {
        let what = || "cannot enter a network namespace".to_owned();
        let before = File::open(OWN).context(what)?;
        let network = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(self.0.as_fd(), network).context(what)?;
        Ok(Inside(before))
    }

    /// Runs a command of ip-link(8), ip-address(8) or the like inside. Words are separated by
    /// spaces.
    ///
    /// # Errors
    /// If the command fails, with its last output.
    pub fn ip(&self, command: &str) -> Result<()> {
        let _inside = self.enter()?;
        let words: Vec<&str> = command.split(' ').collect();
        host::run("ip", &words).map(drop)
    }

    /// Returns a path by which other processes can open the namespace while this value exists.
    pub fn path(&self) -> PathBuf {
        let (process, descriptor) = (std::process::id(), self.0.as_raw_fd());
        PathBuf::from(format!("/proc/{process}/fd/{descriptor}"))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let network = Some(LinkNameSpaceType::Network);
        if let Err(error) = move_into_link_name_space(self.0.as_fd(), network) {
            // All further work of this thread would happen in the wrong network.
            panic!("cannot leave a network namespace: {}", cause(error));
        }
    }
}

/// A bridge in a namespace of its own, which connects its Ethernet ports.
#[derive(Debug)]
pub struct Bridge(pub Namespace);

impl Bridge {
    /// Creates a bridge without ports.
    ///
    /// # Errors
    /// Without root privileges, or if the kernel has no bridges.
    pub fn new() -> Result<Bridge> {
        let namespace = Namespace::new()?;
        namespace.ip("link add bridge type bridge")?;
        namespace.ip("link set bridge up")?;
        Ok(Bridge(namespace))
    }

    /// Connects a namespace to the bridge by a veth pair: `eth0` in the namespace, with `address`
    /// (such as 10.0.0.1/24), and `port` on the bridge.
    ///
    /// # Errors
    /// If the kernel has no veth.
    pub fn connect(&self, port: &str, namespace: &Namespace, address: &str) -> Result<()> {
        let peer = namespace.path();
        let peer = peer.display();
        self.0.ip(&format!(
            "link add {port} type veth peer name eth0 netns {peer}"
        ))?;
        self.0.ip(&format!("link set {port} master bridge up"))?;
        namespace.ip(&format!("address add {address} dev eth0"))?;
        namespace.ip("link set eth0 up")
    }

    /// Adds a tap device as a port. A program that uses the device must open it in the bridge's
    /// namespace.
    ///
    /// # Errors
    /// If the kernel has no tap devices.
    pub fn tap(&self, port: &str) -> Result<()> {
        self.0.ip(&format!("tuntap add dev {port} mode tap"))?;
        self.0.ip(&format!("link set {port} master bridge up"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<String> {
        let text = host::run("ip", &["-o", "link"]).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn bridge_is_confined_to_its_network_namespace() {
        let before = devices();
        let bridge = Bridge::new().unwrap();
        let sides = [Namespace::new().unwrap(), Namespace::new().unwrap()];
        for (number, side) in (1..).zip(&sides) {
            let port = format!("port{number}");
            let address = format!("10.0.0.{number}/24");
            bridge.connect(&port, side, &address).unwrap();
        }
        bridge.tap("tap1").unwrap();
        // A connection is made in the thread's namespace, as a program would do.
        let listener = {
            let _inside = sides[1].enter().unwrap();
            std::net::TcpListener::bind("10.0.0.2:0").unwrap()
        };
        let address = listener.local_addr().unwrap();
        let joined = {
            let _inside = sides[0].enter().unwrap();
            std::net::TcpStream::connect(address).is_ok()
        };
        assert!(joined);
        assert_eq!(devices(), before);
        // This thread is in its first namespace again.
        let first = std::fs::read_link("/proc/self/ns/net").unwrap();
        assert_eq!(std::fs::read_link(OWN).unwrap(), first);
    }
}
