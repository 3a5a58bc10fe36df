//! Where front-ends connect, as it is written.

use clap::builder::{OsStringValueParser, TypedValueParser};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where front-ends connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketSpec {
    /// Path at which the server creates a socket.
    Path(PathBuf),
    /// A listening socket inherited under this number.
    Fd(i32),
    /// The socket that a service manager passes (sd_listen_fds(3)).
    Activated,
}

impl SocketSpec {
    /// A path or `fd:N`.
    pub fn parse(text: &OsStr) -> Result<SocketSpec, String> {
        let Some(number) = text.to_str().and_then(|text| text.strip_prefix("fd:")) else {
            return Ok(SocketSpec::Path(text.into()));
        };
        match number.parse() {
            Ok(fd) if fd >= 0 => Ok(SocketSpec::Fd(fd)),
            _ => Err(format!("'{number}' is not the number of a file descriptor")),
        }
    }
}

/// Parses the value of an option of the command line.
pub fn socket_parser() -> impl TypedValueParser<Value = SocketSpec> {
    OsStringValueParser::new().try_map(|text: OsString| SocketSpec::parse(&text))
}

impl FromStr for SocketSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<SocketSpec, String> {
        SocketSpec::parse(OsStr::new(text))
    }
}

impl fmt::Display for SocketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketSpec::Path(path) => write!(f, "{}", path.display()),
            SocketSpec::Fd(fd) => write!(f, "fd:{fd}"),
            SocketSpec::Activated => f.write_str("from the service manager"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_paths_or_descriptors() {
        let parse = |text: &str| SocketSpec::parse(OsStr::new(text));
        assert_eq!(parse("/run/x"), Ok(SocketSpec::Path("/run/x".into())));
        assert_eq!(parse("fd:3"), Ok(SocketSpec::Fd(3)));
        for bad in ["fd:", "fd:-1", "fd:x", "fd:99999999999"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
