//! qemu-storage-daemon.

use std::process::Command;

use super::{Server, Spec};
use crate::error::Result;
use crate::host;
use crate::machine::comma_safe;

const PROGRAM: &str = "qemu-storage-daemon";
/// QEMU's own default for an I/O thread.
const POLL_MAX_NS: u32 = 32_768;

pub(super) fn check() -> Result<()> {
    host::program(PROGRAM).map(drop)
}

/// With a vhost-user-blk export of a raw file, served by an I/O thread of its own.
pub(super) fn start(spec: &Spec) -> Result<Server> {
    let socket = spec.dir.join(format!("{}.sock", spec.name));
    let file = comma_safe(spec.image);
    let path = comma_safe(&socket);
    let (aio, queues) = (spec.aio.name(), spec.queues);
    let direct = match spec.cache {
        "none" | "directsync" => "on",
        _ => "off",
    };
    let polling = if spec.poll { POLL_MAX_NS } else { 0 };
    let mut command = Command::new(host::program(PROGRAM)?);
    command.arg("--object");
    command.arg(format!("iothread,id=io,poll-max-ns={polling}"));
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=disk,filename={file},aio={aio},cache.direct={direct},discard=unmap"
    ));
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},\
         addr.type=unix,addr.path={path},iothread=io"
    ));
    Server::start(PROGRAM, command, spec.dir, spec.name, socket, None)
}
