//! Starts virtiofsd, which serves a directory.

use std::path::Path;
use std::process::Command;

use super::Server;
use crate::error::Result;
use crate::host;

/// The virtiofsd in Rust, which distributions install outside of PATH.
pub const VIRTIOFSD: &str = "virtiofsd";

impl Server {
    /// Starts virtiofsd for the directory `tree` with the socket `DIR/NAME.sock`, and waits until
    /// it listens. The server exits when its front-end disconnects. No sandbox is used, because the
    /// guest is the lab's own.
    ///
    /// # Errors
    /// When virtiofsd does not start; the error has the last lines of its log.
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
