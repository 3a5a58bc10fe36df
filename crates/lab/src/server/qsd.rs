//! Starts qemu-storage-daemon.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Command;

use super::{Server, Spec};
use crate::error::{Error, Result};
use crate::host;
use crate::machine::{Format, comma_safe};

const PROGRAM: &str = "qemu-storage-daemon";
/// Polling time of an I/O thread in nanoseconds: QEMU's own default.
const POLL_MAX_NS: u32 = 32_768;

pub(super) fn check(spec: &Spec) -> Result<()> {
    if !matches!(spec.cache, "none" | "writeback") {
        let what = "qemu-storage-daemon has none and writeback for its exports";
        return Err(Error::Protocol(format!("--cache {}: {what}", spec.cache)));
    }
    host::program(PROGRAM).map(drop)
}

/// Starts qemu-storage-daemon with a vhost-user-blk export of an image, served by a separate I/O
/// thread.
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
    let driver = if is_block_device(spec.image) {
        "host_device"
    } else {
        "file"
    };
    let (node, format) = match spec.format {
        Format::Raw => ("disk", None),
        other => (
            "file",
            Some(format!("driver={other},node-name=disk,file=file")),
        ),
    };
    let file = format!(
        "driver={driver},node-name={node},filename={file},aio={aio},cache.direct={direct},discard=unmap"
    );
    for node in [Some(file), format].into_iter().flatten() {
        command.arg("--blockdev").arg(node);
    }
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},\
         addr.type=unix,addr.path={path},iothread=io"
    ));
    Server::start(PROGRAM, command, spec.dir, spec.name, socket, None)
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device())
}
