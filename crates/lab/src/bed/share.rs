//! A guest that mounts a directory of this machine.

use std::path::Path;

use super::GuestBed;
use crate::error::Result;
use crate::machine::{Machine, comma_safe};
use crate::server::Server;

/// The guest's name of the directory.
pub const TAG: &str = "tree";

/// How a guest accesses a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol<'a> {
    /// Served by QEMU itself; `mount` are the guest's mount options.
    NineP { mount: &'a str },
    /// Served by virtiofsd with these arguments.
    Virtiofs { arguments: &'a [&'a str] },
}

impl Protocol<'_> {
    /// Returns the guest's modules in addition to those of every guest.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Protocol::NineP { .. } => &["9p", "9pnet_virtio"],
            Protocol::Virtiofs { .. } => &["virtiofs"],
        }
    }

    /// Returns the shell command by which the guest mounts the directory.
    pub fn mount(self, place: &str) -> String {
        match self {
            Protocol::NineP { mount } => {
                format!("mount -t 9p -o trans=virtio,version=9p2000.L,{mount} {TAG} {place}")
            }
            Protocol::Virtiofs { .. } => format!("mount -t virtiofs {TAG} {place}"),
        }
    }

    /// Starts the server, if the protocol has a separate one, and adds the device to the machine.
    fn serve(self, machine: &mut Machine, tree: &Path, dir: &Path) -> Result<Option<Server>> {
        let (device, server) = match self {
            Protocol::NineP { .. } => (nine_p(tree), None),
            Protocol::Virtiofs { arguments } => {
                let server = Server::virtiofsd(dir, TAG, tree, arguments)?;
                (virtiofs(server.socket()), Some(server))
            }
        };
        machine.extra.extend(device);
        Ok(server)
    }
}

/// Files have the same owners on this machine as in the guest.
fn nine_p(tree: &Path) -> [String; 4] {
    let path = comma_safe(tree);
    [
        "-fsdev".to_owned(),
        format!("local,id={TAG},path={path},security_model=passthrough"),
        "-device".to_owned(),
        format!("virtio-9p-pci,fsdev={TAG},mount_tag={TAG}"),
    ]
}

fn virtiofs(socket: &Path) -> [String; 4] {
    let path = comma_safe(socket);
    [
        "-chardev".to_owned(),
        format!("socket,id={TAG},path={path}"),
        "-device".to_owned(),
        format!("vhost-user-fs-pci,chardev={TAG},tag={TAG}"),
    ]
}

impl GuestBed {
    /// Boots the machine with the directory `tree` added to it, which the guest must
    /// [mount](Protocol::mount). Sockets and logs go to `dir`.
    ///
    /// # Errors
    /// When a server or the guest does not start; the error has their last messages.
    pub fn share(
        mut machine: Machine,
        protocol: Protocol,
        tree: &Path,
        dir: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<GuestBed> {
        let server = protocol.serve(&mut machine, tree, dir)?;
        let modules = protocol.modules().iter().map(|&name| name.to_owned());
        machine.modules.extend(modules);
        let mut bed = GuestBed::start(machine, server, "with a directory of ours", progress)?;
        bed.image = tree.to_owned();
        Ok(bed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_no_options() {
        let [_, fsdev, _, device] = nine_p(Path::new("/a,b"));
        assert!(fsdev.contains(",path=/a,,b,"), "{fsdev}");
        assert!(device.ends_with(",fsdev=tree,mount_tag=tree"), "{device}");
        let [_, chardev, ..] = virtiofs(Path::new("/a,b"));
        assert!(chardev.ends_with("path=/a,,b"), "{chardev}");
    }
}
