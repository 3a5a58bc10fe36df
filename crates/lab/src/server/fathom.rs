//! Starts `fathom serve`.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Server, Spec};
use crate::error::{Context, Result};
use crate::machine::Format;

impl Server {
    /// Starts `fathom serve DISK --vhost-user DIR/NAME.sock --api DIR/NAME.api ARGS` and waits
    /// until its socket listens. `disk` is a path, or `memory:SIZE` or `null:SIZE`.
    ///
    /// # Errors
    /// When the server does not start; the error has the last lines of its log.
    pub fn fathom(
        binary: &Path,
        dir: &Path,
        name: &str,
        disk: &str,
        args: &[&str],
    ) -> Result<Self> {
        let socket = dir.join(format!("{name}.sock"));
        let api = dir.join(format!("{name}.api"));
        let mut command = Command::new(binary);
        command.args(["serve", disk, "--vhost-user"]).arg(&socket);
        command.arg("--api").arg(&api).args(args);
        Self::start("fathom serve", command, dir, name, socket, Some(api))
    }

    /// Starts `fathom serve --config DIR/NAME.toml` with `config` in that file. Waits until the
    /// socket `last` listens, which must be that of the last disk in the configuration.
    ///
    /// # Errors
    /// When the server does not start; the error has the last lines of its log.
    pub fn fathom_configured(
        binary: &Path,
        dir: &Path,
        name: &str,
        config: &str,
        last: &Path,
    ) -> Result<Self> {
        let file = dir.join(format!("{name}.toml"));
        fs::write(&file, config).context(|| format!("cannot write {}", file.display()))?;
        let mut command = Command::new(binary);
        command.args(["serve", "--config"]).arg(&file);
        Self::start("fathom serve", command, dir, name, last.to_owned(), None)
    }
}

pub(super) fn start(spec: &Spec) -> Result<Server> {
    let mut args = vec![
        format!("--aio={}", spec.aio.name()),
        format!("--cache={}", spec.cache),
        format!("--poll={}", if spec.poll { "auto" } else { "off" }),
        format!("--queues={}", spec.queues),
    ];
    if spec.format != Format::Raw {
        args.push(format!("--format={}", spec.format));
    }
    if let Some(threads) = spec.threads {
        args.push(format!("--iothreads={threads}"));
    }
    args.extend(spec.options.iter().cloned());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let disk = spec.image.to_string_lossy();
    Server::fathom(spec.fathom, spec.dir, spec.name, &disk, &args)
}
