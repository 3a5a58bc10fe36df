//! URIs of NBD exports, as in doc/uri.md of the NBD project.

mod terms;
mod text;

use crate::protocol::MAX_STRING;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
pub use terms::TlsTerms;
use text::{decode, query_of};

/// The port that IANA has assigned to NBD.
pub const PORT: u16 = 10809;

/// The address of an export: `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH` or
/// `nbd+vsock://CID[:PORT]/EXPORT`. The schemes with `nbds` in place of `nbd` use TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    address: Address,
    export: String,
    tls: Option<TlsTerms>,
    text: String,
}

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Name or address of a host, and a port.
    Tcp(String, u16),
    /// Address of an AF_VSOCK socket.
    Vsock {
        /// Context identifier of the machine; 2 is the host.
        cid: u32,
        /// Port at which the server listens.
        port: u32,
    },
}

impl Address {
    /// Returns the host's name; other kinds of sockets are on `localhost`.
    fn host(&self) -> &str {
        match self {
            Address::Tcp(host, _) => host,
            Address::Unix(_) | Address::Vsock { .. } => "localhost",
        }
    }
}

impl NbdUri {
    /// Returns the URI as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the server's address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns the export's name; an empty name is the server's default export.
    pub fn export(&self) -> &str {
        &self.export
    }

    /// Returns the TLS settings. `None` if the connection does not use TLS.
    pub fn tls(&self) -> Option<&TlsTerms> {
        self.tls.as_ref()
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
            "nbd" | "nbds" => tcp(authority)?,
            "nbd+unix" | "nbds+unix" => unix(authority, query)?,
            "nbd+vsock" | "nbds+vsock" => vsock(authority)?,
            _ => {
                return Err(format!(
                    "{scheme}: must be nbd, nbd+unix or nbd+vsock, or with TLS nbds, nbds+unix or nbds+vsock"
                ));
            }
        };
        let tls = match scheme.starts_with("nbds") {
            true => Some(TlsTerms::new(address.host(), query)?),
            false if query_of(query).any(|(key, _)| key.starts_with("tls-")) => {
                return Err(format!("{scheme}: without TLS; write nbds"));
            }
            false => None,
        };
        let export = decode(export)?;
        if export.len() > MAX_STRING {
            return Err(format!("an export's name has at most {MAX_STRING} bytes"));
        }
        Ok(NbdUri {
            address,
            export,
            tls,
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
    let (_, path) = query_of(query)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Address, String) {
        let uri: NbdUri = text.parse().unwrap();
        assert_eq!(uri.to_string(), text);
        (uri.address, uri.export)
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
    fn tls_is_on_the_terms_of_the_uri() {
        let terms = |text: &str| text.parse::<NbdUri>().unwrap().tls().cloned();
        assert_eq!(terms("nbd://host"), None);
        for (text, server, certificates) in [
            ("nbds://host/x", "host", None),
            ("nbds://[::1]", "::1", None),
            ("nbds+unix:///?socket=/s", "localhost", None),
            ("nbds+vsock://2", "localhost", None),
            (
                "nbds://h?tls-hostname=a&tls-certificates=%2fp",
                "a",
                Some("/p"),
            ),
        ] {
            let expected = TlsTerms {
                certificates: certificates.map(PathBuf::from),
                server: server.into(),
            };
            assert_eq!(terms(text), Some(expected), "{text}");
        }
        let terms = terms("nbds://h?tls-certificates=/p").unwrap();
        assert_eq!(
            terms.files().all().collect::<Vec<_>>(),
            ["/p/ca-cert.pem", "/p/client-cert.pem", "/p/client-key.pem"].map(PathBuf::from)
        );
    }

    #[test]
    fn other_uris_are_refused() {
        for (text, word) in [
            ("/run/s", "not an NBD URI"),
            ("http://x", "nbd+unix"),
            ("nbdx://x", "nbds"),
            ("nbds://x?tls-psk-file=/x", "tls-certificates"),
            ("nbds://x?tls-verify-peer=false", "tls-certificates"),
            ("nbd://x?tls-certificates=/x", "nbds"),
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
