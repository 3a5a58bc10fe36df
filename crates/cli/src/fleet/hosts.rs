//! The arguments that select hosts.

use anyhow::{Context, anyhow, bail};
use clap::Args;
use fathom_client::fleet::allow_files;
use fathom_client::{Credentials, PORT, Remote, Server, split_host};
use fathom_units::parse_duration;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum timeout for a host.
const LONGEST: Duration = Duration::from_secs(300);
/// Maximum size of a file of hosts in bytes.
const MAX_FILE: u64 = 16 << 20;

#[derive(Args, Debug)]
pub struct Hosts {
    /// Hosts: a file, a DNS name, or a list such as host1,host2:9000
    ///
    /// A file has one HOST or HOST:PORT per line, and comments start with #. A DNS name stands for
    /// all its addresses. [default port: 9826]
    #[arg(long, value_name = "FILE|DNS|HOST,...")]
    hosts: String,

    /// Directory with ca-cert.pem, client-cert.pem and client-key.pem
    ///
    /// Certificates of the servers must be signed by ca-cert.pem.
    #[arg(long, value_name = "DIR", default_value = "/etc/fathom/fleet")]
    certificates: PathBuf,

    /// Name in the certificates of the servers [default: the host's name in --hosts]
    #[arg(long, value_name = "NAME")]
    tls_hostname: Option<String>,

    /// Timeout for each host, 1ms to 5min
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_timeout)]
    pub timeout: Duration,
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    match (Duration::from_millis(1)..=LONGEST).contains(&time) {
        true => Ok(time),
        false => Err("must be 1ms to 5min".to_owned()),
    }
}

impl Hosts {
    /// Returns all hosts, each once.
    pub fn servers(&self) -> anyhow::Result<Vec<Server>> {
        let (hosts, name) = self.named()?;
        let name = self.tls_hostname.clone().or(name);
        let credentials = Credentials::load(&self.certificates, name)?;
        let mut servers = BTreeMap::new();
        for host in hosts {
            let remote = Remote::new(&host, &credentials);
            let remote = remote.map_err(|problem| anyhow!("--hosts: {problem}"))?;
            // Different spellings of a host have the same place.
            servers
                .entry(remote.place())
                .or_insert(Server::Remote(remote));
        }
        allow_files();
        Ok(servers.into_values().collect())
    }

    /// Returns the hosts, and the name in their certificates if the DNS name stands for several
    /// hosts.
    fn named(&self) -> anyhow::Result<(BTreeSet<String>, Option<String>)> {
        let path = Path::new(&self.hosts);
        match std::fs::metadata(path) {
            Ok(found) if !found.is_dir() => return Ok((read(path)?, None)),
            _ if self.hosts.contains('/') => bail!("--hosts: there is no file {}", path.display()),
            _ => {}
        }
        let several = self.hosts.split(',').map(str::trim).map(str::to_owned);
        let several: BTreeSet<_> = several.collect();
        if self.hosts.contains(',') {
            return Ok((several, None));
        }
        let Some((name, port)) = split_host(&self.hosts, PORT) else {
            bail!("--hosts: '{}' is not NAME or NAME:PORT", self.hosts);
        };
        let found = (&*name, port).to_socket_addrs();
        let found =
            found.with_context(|| format!("--hosts: '{name}' is neither a file nor in the DNS"))?;
        // A host may have IPv4 and IPv6 addresses, and must be counted once.
        let (mut addresses, others): (BTreeSet<_>, BTreeSet<_>) =
            found.partition(SocketAddr::is_ipv4);
        if addresses.is_empty() {
            addresses = others;
        }
        match addresses.len() {
            0 => bail!("--hosts: '{name}' has no address in the DNS"),
            1 => Ok((several, None)),
            _ => Ok((
                addresses.iter().map(SocketAddr::to_string).collect(),
                Some(name),
            )),
        }
    }
}

fn read(path: &Path) -> anyhow::Result<BTreeSet<String>> {
    let what = || format!("--hosts: {}", path.display());
    let mut text = String::new();
    let file = File::open(path).with_context(what)?;
    file.take(MAX_FILE)
        .read_to_string(&mut text)
        .with_context(what)?;
    if text.len() as u64 >= MAX_FILE {
        bail!(
            "--hosts: {} is too long for a list of hosts",
            path.display()
        );
    }
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim());
    let hosts: BTreeSet<_> = lines
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect();
    match hosts.is_empty() {
        true => bail!("--hosts: {} names no host", path.display()),
        false => Ok(hosts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(hosts: &str) -> anyhow::Result<(BTreeSet<String>, Option<String>)> {
        let hosts = Hosts {
            hosts: hosts.to_owned(),
            certificates: PathBuf::new(),
            tls_hostname: None,
            timeout: Duration::ZERO,
        };
        hosts.named()
    }

    #[test]
    fn hosts_are_named_in_three_ways() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        std::fs::write(&file, "# all of them\n b:1 # the second\n\na\nb:1\n").unwrap();
        let set = |hosts: &[&str]| hosts.iter().map(|&host| host.to_owned()).collect();
        let file = file.to_str().unwrap();
        assert_eq!(named(file).unwrap(), (set(&["a", "b:1"]), None));
        assert_eq!(named("x, y:2,x").unwrap(), (set(&["x", "y:2"]), None));
        assert_eq!(named("[::1]:70").unwrap(), (set(&["[::1]:70"]), None));
        // A name with one address is the name of a host.
        assert_eq!(
            named("127.0.0.1:70").unwrap(),
            (set(&["127.0.0.1:70"]), None)
        );
        std::fs::write(file, "# none\n").unwrap();
        for (hosts, problem) in [
            (file, "names no host"),
            ("/no/such", "there is no file /no/such"),
            ("no-such-name.invalid", "neither a file nor in the DNS"),
            ("a:b", "is not NAME or NAME:PORT"),
        ] {
            let error = format!("{:#}", named(hosts).unwrap_err());
            assert!(error.contains(problem), "{error}");
        }
    }
}
