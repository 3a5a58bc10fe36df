//! Where an NBD export is, as doc/uri.md of the NBD project writes it.

use crate::protocol::MAX_STRING;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The port that IANA has assigned to NBD.
pub const PORT: u16 = 10809;

/// `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH` or
/// `nbd+vsock://CID[:PORT]/EXPORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    address: Address,
    export: String,
    text: String,
}

/// What to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket's path.
    Unix(PathBuf),
    /// A host's name or address, and a port.
    Tcp(String, u16),
    /// Of AF_VSOCK.
    Vsock {
        /// Whose: 2 is the host.
        cid: u32,
        /// Where it listens.
        port: u32,
    },
}

impl NbdUri {
    /// The URI as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Where the server is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The export's name; empty: the server's default export.
    pub fn export(&self) -> &str {
        &self.export
    }

    /// Whether this is meant to be an NBD URI: it begins with a scheme of one.
    pub fn is_one(text: &str) -> bool {
        let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
        matches!(scheme, "nbd" | "nbds")
            || scheme.starts_with("nbd+")
            || scheme.starts_with("nbds+")
    }
}

impl FromStr for NbdUri {
    type Err = String;

    fn from_str(text: &str) -> Result<NbdUri, String> {
        let (scheme, rest) = text.split_once("://").ok_or(
            "not an NBD URI; write for example nbd://localhost or nbd+unix:///?socket=PATH",
        )?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let address = match scheme {
            "nbd" => tcp(authority)?,
            "nbd+unix" => unix(authority, query)?,
            "nbd+vsock" => vsock(authority)?,
            "nbds" | "nbds+unix" | "nbds+vsock" => {
                return Err(format!("{scheme}: TLS is not supported here"));
            }
            _ => return Err(format!("{scheme}: must be nbd, nbd+unix or nbd+vsock")),
        };
        let export = decode(export)?;
        if export.len() > MAX_STRING {
            return Err(format!("an export's name has at most {MAX_STRING} bytes"));
        }
        Ok(NbdUri {
            address,
            export,
            text: text.into(),
        })
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn tcp(authority: &str) -> Result<Address, String> {
    let authority = authority.rsplit_once('@').map_or(authority, |(_, a)| a);
    let (host, rest) = match authority.strip_prefix('[') {
        Some(v6) => v6.split_once(']').ok_or("no ] after the address")?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = match rest.strip_prefix(':') {
        None | Some("") => PORT,
        Some(port) => port.parse().map_err(|_| format!("{port}: not a port"))?,
    };
    let host = if host.is_empty() { "localhost" } else { host };
    Ok(Address::Tcp(decode(host)?, port))
}

fn unix(authority: &str, query: &str) -> Result<Address, String> {
    if !authority.is_empty() {
        return Err("nbd+unix has no host: write nbd+unix:///EXPORT?socket=PATH".into());
    }
    let mut pairs = query.split(['&', ';']).filter_map(|p| p.split_once('='));
    let (_, path) = pairs
        .find(|(key, _)| *key == "socket")
        .ok_or("nbd+unix needs the socket: write nbd+unix:///EXPORT?socket=PATH")?;
    Ok(Address::Unix(decode(path)?.into()))
}

fn vsock(authority: &str) -> Result<Address, String> {
    let bad = || "nbd+vsock needs numbers: write nbd+vsock://CID[:PORT]/EXPORT".to_owned();
    let (cid, port) = match authority.split_once(':') {
        None | Some((_, "")) => (authority.trim_end_matches(':'), u32::from(PORT)),
        Some((cid, port)) => (cid, port.parse().map_err(|_| bad())?),
    };
    let cid = cid.parse().map_err(|_| bad())?;
    Ok(Address::Vsock { cid, port })
}

/// Replaces %XX.
fn decode(text: &str) -> Result<String, String> {
    let bad = || format!("{text}: % must be followed by two hexadecimal digits");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        rest = others;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).ok_or_else(bad)?;
        let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| bad())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| format!("{text}: not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Address, String) {
        let uri: NbdUri = text.parse().unwrap();
        assert_eq!(uri.to_string(), text);
        assert!(NbdUri::is_one(text));
        (uri.address, uri.export)
    }

    #[test]
    fn paths_and_other_uris_are_told_from_ours() {
        for text in [
            "/run/nbd",
            "nbd",
            "nbd.img",
            "nbd:x",
            "http://nbd",
            "x/nbd://y",
        ] {
            assert!(!NbdUri::is_one(text), "{text}");
        }
        assert!(NbdUri::is_one("nbds+unix://"));
    }

    #[test]
    fn uris_are_those_of_the_nbd_project() {
        let tcp = |host: &str, port| Address::Tcp(host.into(), port);
        let unix = |path: &str| Address::Unix(path.into());
        let vsock = |cid, port| Address::Vsock { cid, port };
        for (text, address, export) in [
            ("nbd://host", tcp("host", 10809), ""),
            ("nbd://host/", tcp("host", 10809), ""),
            ("nbd://user@host:1/a/b", tcp("host", 1), "a/b"),
            ("nbd://[::1]:10810/disk", tcp("::1", 10810), "disk"),
            ("nbd://", tcp("localhost", 10809), ""),
            ("nbd+unix:///?socket=/run/s", unix("/run/s"), ""),
            ("nbd+unix:///a%20b?x=y&socket=/a%2fb", unix("/a/b"), "a b"),
            ("nbd+vsock://2", vsock(2, 10809), ""),
            ("nbd+vsock://2:70000/x", vsock(2, 70000), "x"),
        ] {
            assert_eq!(parsed(text), (address, export.into()), "{text}");
        }
    }

    #[test]
    fn other_uris_are_refused() {
        for (text, word) in [
            ("/run/s", "not an NBD URI"),
            ("http://x", "nbd+unix"),
            ("nbds://x", "TLS"),
            ("nbd+unix:///", "socket"),
            ("nbd+unix://host/?socket=s", "no host"),
            ("nbd://[::1", "]"),
            ("nbd://h:70000", "port"),
            ("nbd+vsock://host", "CID"),
            ("nbd+vsock://2:x", "CID"),
            ("nbd://h/%zz", "%"),
            ("nbd://h/%4", "%"),
            ("nbd://h/%ff", "UTF-8"),
        ] {
            let e = text.parse::<NbdUri>().unwrap_err();
            assert!(e.contains(word), "{text}: {e}");
        }
        let long = format!("nbd://h/{}", "x".repeat(4097));
        assert!(long.parse::<NbdUri>().is_err());
    }
}
