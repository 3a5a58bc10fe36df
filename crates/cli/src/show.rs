//! `fathom show`: shows a disk, and how to attach it to a virtual machine.

use crate::stats::info;
use crate::target::Target;
use anyhow::{Context, bail};
use clap::Args;
use std::io::Write;
use std::path::absolute;

/// Show a disk's state, or how to attach it to a VM
///
/// Without an option the output is the state of the disk, or of all disks of a server. With --qemu,
/// --libvirt, --cloud-hypervisor or --firecracker the output attaches one disk to a virtual
/// machine.
#[derive(Args, Debug)]
pub struct ShowArgs {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    form: Form,

    /// Print JSON
    #[arg(long, conflicts_with = "vmm")]
    json: bool,
}

#[derive(Args, Debug)]
#[group(id = "vmm", multiple = false)]
struct Form {
    /// Print options for QEMU
    #[arg(long)]
    qemu: bool,

    /// Print XML for a libvirt domain
    #[arg(long)]
    libvirt: bool,

    /// Print options for cloud-hypervisor
    #[arg(long)]
    cloud_hypervisor: bool,

    /// Print arguments of curl for Firecracker's API
    #[arg(long)]
    firecracker: bool,
}

pub fn run(args: ShowArgs) -> anyhow::Result<()> {
    let (form, memory): (fn(&str, &str) -> String, _) = match &args.form {
        Form { qemu: true, .. } => (qemu, QEMU_MEMORY),
        Form { libvirt: true, .. } => (libvirt, LIBVIRT_MEMORY),
        Form {
            cloud_hypervisor: true,
            ..
        } => (cloud_hypervisor, CLOUD_HYPERVISOR_MEMORY),
        Form {
            firecracker: true, ..
        } => (firecracker, ""),
        _ => return info(&args.target, args.json),
    };
    let disk = args.target.disk()?.info()?;
    let name = &disk.name;
    let Some(socket) = disk
        .vhost_user
        .as_deref()
        .filter(|at| !at.starts_with("fd:"))
    else {
        bail!(
            "disk '{name}' has no socket for virtual machines that is known here (--vhost-user PATH)"
        );
    };
    let socket = absolute(socket)?;
    let socket = socket
        .to_str()
        .context("the socket's path is not valid UTF-8")?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", form(&id_of(name), socket))?;
    // The note goes to stderr, because a program may read stdout.
    if args.form.libvirt {
        eprintln!("(vdb: or another name that the domain does not use)");
    }
    if !memory.is_empty() {
        eprintln!("(the guest's memory must be shared: {memory})");
    }
    Ok(())
}

const QEMU_MEMORY: &str =
    "-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem";
const LIBVIRT_MEMORY: &str = "<memoryBacking><source type='memfd'/><access mode='shared'/>\
                              </memoryBacking>";
const CLOUD_HYPERVISOR_MEMORY: &str = "--memory size=SIZE,shared=on";

/// Returns an id that all VMMs accept: letters, digits, - and _, beginning with a letter.
fn id_of(name: &str) -> String {
    let plain = |letter: char| match letter.is_ascii_alphanumeric() || letter == '-' {
        true => letter,
        false => '_',
    };
    let id: String = name.chars().map(plain).take(60).collect();
    match id.starts_with(|first: char| first.is_ascii_alphabetic()) {
        true => id,
        false => format!("disk-{id}"),
    }
}

/// Returns QEMU's options. In QEMU's option values, a comma is written twice.
fn qemu(id: &str, socket: &str) -> String {
    let path = socket.replace(',', ",,");
    format!(
        "-chardev socket,id={id}-socket,path={path},reconnect-ms=1000 \
         -device vhost-user-blk-pci,id={id},chardev={id}-socket"
    )
}

fn libvirt(id: &str, socket: &str) -> String {
    let mut path = String::new();
    for letter in socket.chars() {
        match letter {
            '&' => path.push_str("&amp;"),
            '<' => path.push_str("&lt;"),
            '\'' => path.push_str("&apos;"),
            other => path.push(other),
        }
    }
    format!(
        "<disk type='vhostuser' device='disk'>\n  \
           <driver name='qemu' type='raw'/>\n  \
           <source type='unix' path='{path}'>\n    \
             <reconnect enabled='yes' timeout='1'/>\n  \
           </source>\n  \
           <target dev='vdb' bus='virtio'/>\n  \
           <alias name='ua-{id}'/>\n\
         </disk>"
    )
}

fn cloud_hypervisor(id: &str, socket: &str) -> String {
    format!("--disk id={id},vhost_user=true,socket={socket}")
}

fn firecracker(id: &str, socket: &str) -> String {
    // Ids of Firecracker have no dashes.
    let id = id.replace('-', "_");
    let drive = serde_json::json!({
        "drive_id": id, "is_root_device": false, "cache_type": "Writeback", "socket": socket
    });
    format!("-X PUT http://localhost/drives/{id} -d '{drive}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_are_what_each_of_them_takes() {
        assert_eq!(id_of("/srv/a b.img"), "disk-_srv_a_b_img");
        assert_eq!(id_of("root-1"), "root-1");
        let said = qemu("a", "/run/a,b");
        assert!(
            said.starts_with("-chardev socket,id=a-socket,path=/run/a,,b,"),
            "{said}"
        );
        let said = libvirt("a", "/run/<a>&'b'");
        assert!(
            said.contains("path='/run/&lt;a>&amp;&apos;b&apos;'"),
            "{said}"
        );
        assert!(firecracker("a-b", "/run/a").contains(r#""drive_id":"a_b""#));
    }
}
