//! `fathom-vhost-user-blk`: converts the options of QEMU's back-end conventions to those of `fathom
//! serve` (docs/interop/vhost-user.rst, "Backend program conventions").

use crate::usage;
use clap::Parser;
use std::ffi::{OsStr, OsString};
use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Name under which the program follows QEMU's conventions.
const NAME: &str = "fathom-vhost-user-blk";
const CAPABILITIES: &str = r#"{"type": "block", "features": ["read-only", "blk-file"]}"#;

/// Serve a disk to a virtual machine, with the options of QEMU's back-end conventions
///
/// Options after -- are those of `fathom serve`.
#[derive(Debug, Parser)]
#[command(name = NAME, version, max_term_width = 100)]
struct Backend {
    /// Socket for the virtual machine
    #[arg(long, value_name = "PATH", required_unless_present = "fd")]
    socket_path: Option<PathBuf>,

    /// Inherited listening socket, by its file descriptor
    #[arg(long, value_name = "FDNUM", conflicts_with = "socket_path")]
    fd: Option<u32>,

    /// Print the capabilities of this back-end and exit
    #[arg(long)]
    print_capabilities: bool,

    /// Image file or block device
    #[arg(long, value_name = "PATH", required = true)]
    blk_file: PathBuf,

    /// Let the guest only read
    #[arg(long)]
    read_only: bool,

    /// More options of `fathom serve`
    #[arg(last = true, value_name = "OPTIONS")]
    more: Vec<OsString>,
}

/// How to run the program with these arguments.
pub enum Meant {
    /// The arguments are those of `fathom`.
    AsTheyAre,
    /// The arguments were a back-end's, and are converted to these arguments of `fathom`.
    Serve(Vec<OsString>),
    /// The program is done and exits.
    Done(ExitCode),
}

pub fn understand(args: &[OsString]) -> Meant {
    let name = args
        .first()
        .and_then(|program| Path::new(program).file_name());
    if name != Some(OsStr::new(NAME)) {
        return Meant::AsTheyAre;
    }
    // --print-capabilities takes precedence over all other options.
    if args.iter().any(|arg| arg == "--print-capabilities") {
        return Meant::Done(match writeln!(stdout(), "{CAPABILITIES}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        });
    }
    match Backend::try_parse_from(args) {
        Ok(backend) => Meant::Serve(backend.into_args()),
        Err(error) => Meant::Done(usage::report(&error, NAME)),
    }
}

impl Backend {
    fn into_args(self) -> Vec<OsString> {
        let socket = match (self.socket_path, self.fd) {
            (Some(path), _) => path.into_os_string(),
            (None, fd) => format!("fd:{}", fd.unwrap_or_default()).into(),
        };
        let fixed = ["fathom", "serve"].map(OsString::from);
        let mut args = Vec::from(fixed);
        args.extend(["--vhost-user".into(), socket]);
        if self.read_only {
            args.push("--readonly".into());
        }
        args.extend(self.more);
        args.extend(["--".into(), self.blk_file.into_os_string()]);
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(args: &[&str]) -> Option<String> {
        let program = format!("/usr/libexec/{NAME}");
        let args: Vec<_> = std::iter::once(&*program)
            .chain(args.iter().copied())
            .collect();
        match understand(&args.iter().map(OsString::from).collect::<Vec<_>>()) {
            Meant::Serve(args) => Some(args.join(OsStr::new(" ")).into_string().unwrap()),
            _ => None,
        }
    }

    #[test]
    fn a_back_ends_options_are_those_of_a_server() {
        let said = meant(&["--socket-path=/s", "--blk-file", "-x", "--read-only"]);
        assert_eq!(said, None, "an option is no path");
        let said = meant(&["--socket-path=/s", "--blk-file=-x", "--read-only"]);
        assert_eq!(
            said.unwrap(),
            "fathom serve --vhost-user /s --readonly -- -x"
        );
        let said = meant(&["--fd=5", "--blk-file=/x", "--", "--format", "qcow2"]);
        let wanted = "fathom serve --vhost-user fd:5 --format qcow2 -- /x";
        assert_eq!(said.unwrap(), wanted);
        assert_eq!(
            meant(&["--fd=5", "--socket-path=/s", "--blk-file=/x"]),
            None
        );
        assert_eq!(meant(&["--blk-file=/x"]), None);
        let plain = ["/usr/bin/fathom", "--socket-path=/s"].map(OsString::from);
        assert!(matches!(understand(&plain), Meant::AsTheyAre));
    }
}
