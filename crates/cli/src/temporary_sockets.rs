//! The server of `fathom serve --run`: its temporary sockets, and its end with its parent.

use anyhow::Context;
use fathom_exports::nbd::Address;
use fathom_spec::SocketSpec;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// Names of sockets in the temporary directory.
pub const NOTIFY: &str = "notify";
pub const NBD: &str = "nbd.sock";
pub const VHOST_USER: &str = "vhost-user.sock";

/// The path that the user writes for a temporary socket.
pub const TEMPORARY: &str = "-";

/// Makes the kernel stop this server when its parent, which runs the command, ends.
pub fn stop_with_parent(dir: &Path) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    // If the parent has already ended, the kernel sends no signal, but the connection fails.
    let notify = UnixDatagram::unbound()?;
    let connected = notify.connect(dir.join(NOTIFY));
    connected.context("--run: the process that runs the command has ended")
}

/// Replaces `-` with sockets in `dir`. Without any socket, adds one for NBD clients.
///
/// # Errors
///
/// Fails if `-` is used without `dir`, which only `--run` provides.
pub fn replace_temporary(
    nbd: &mut Vec<Address>,
    vhost_user: &mut Option<SocketSpec>,
    dir: Option<&Path>,
) -> Result<(), String> {
    let nbd_socket = Address::Unix(TEMPORARY.into());
    let vhost_user_socket = SocketSpec::Path(TEMPORARY.into());
    let Some(dir) = dir else {
        if nbd.contains(&nbd_socket) || vhost_user.as_ref() == Some(&vhost_user_socket) {
            return Err("a temporary socket ('-') needs --run; otherwise name the socket".into());
        }
        return Ok(());
    };
    if nbd.is_empty() && vhost_user.is_none() {
        nbd.push(nbd_socket.clone());
    }
    for address in nbd.iter_mut().filter(|address| **address == nbd_socket) {
        *address = Address::Unix(dir.join(NBD));
    }
    if let Some(spec) = vhost_user
        .as_mut()
        .filter(|spec| **spec == vhost_user_socket)
    {
        *spec = SocketSpec::Path(dir.join(VHOST_USER));
    }
    Ok(())
}
