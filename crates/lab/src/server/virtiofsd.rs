//! virtiofsd, which serves a directory.

use std::path::Path;
use std::process::Command;

use super::Server;
use crate::error::Result;
use crate::host;

/// The one in Rust, which distributions do not put into the path.
pub const VIRTIOFSD: &str = "virtiofsd";

impl Server {
    /// Starts virtiofsd for the directory `tree`, with a socket `DIR/NAME.sock`, and waits until that
    /// listens. It ends when its front-end has hung up. It is no jail: the guest is our own.
    ///
    /// # Errors
    /// When it does not start; the error has the end of what it said.
    pub fn virtiofsd(dir: &Path, name: &str, tree: &Path, args: &[&str]) -> Result<Self> {
        let socket = dir.join(format!("{name}.sock"));
        let mut command = Command::new(host::program(VIRTIOFSD)?);
        command.arg("--shared-dir").arg(tree);
        command.arg("--socket-path").arg(&socket);
        command.args(["--sandbox=none", "--log-level=warn"]);
        command.args(args);
        Self::start(VIRTIOFSD, command, dir, name, socket, None)
    }
}
