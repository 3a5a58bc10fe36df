//! Tests `fathom fleet`: servers on several hosts are queried through TLS and shown together.

#[path = "../support/mod.rs"]
mod support;

mod door;
mod loads;
mod many;
mod wire;

use serde_json::Value;
use support::certificates::Certificates;
use support::{Served, stdout_of};

/// Starts a server that other hosts may query; its NBD clients connect at `n`.
///
/// Also returns the server's address.
fn host(certificates: &Certificates, disks: &str) -> (Served, String) {
    let of_api = format!(
        ", listen = '127.0.0.1:0', tls-certificates = '{}'",
        certificates.path("server")
    );
    let mut served = Served::waiting(&of_api, disks);
    let address = address(&mut served);
    (served, address)
}

fn address(served: &mut Served) -> String {
    const WORDS: &str = "clients of other hosts can connect by TLS at ";
    served.wait_for(WORDS);
    let log = served.log();
    let at = log.split(WORDS).nth(1).unwrap();
    at.split_whitespace().next().unwrap().to_owned()
}

/// Returns the output of `fathom fleet` for these hosts, as JSON.
fn fleet(certificates: &Certificates, command: &str, hosts: &str, more: &[&str]) -> Value {
    let client = certificates.path("client");
    let args = [
        "fleet",
        command,
        "--hosts",
        hosts,
        "--certificates",
        &client,
        "--json",
    ];
    serde_json::from_str(&stdout_of(&[&args[..], more].concat())).unwrap()
}

fn nbd(served: &Served, disk: &str) -> String {
    format!("nbd+unix:///{disk}?socket={}", served.arg("n"))
}
