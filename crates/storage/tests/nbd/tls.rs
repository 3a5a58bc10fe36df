//! Tests servers that are reached by TLS.

use crate::server::{Server, guest, refused};
use crate::servers::exercise;
use fathom_nbd::NbdUri;
use fathom_storage::{EngineKind, NbdDisk, NbdOptions};
use fathom_tls::pki::Pki;
use std::path::Path;
use std::sync::Arc;

/// Returns the URI of a server in this directory, with the client's certificates.
fn nbds(server: &Server, certificates: &Path, more: &str) -> NbdUri {
    let socket = server.dir.path().join("s");
    let text = format!(
        "nbds+unix:///?socket={}&tls-certificates={}{more}",
        socket.display(),
        certificates.display()
    );
    text.parse().expect("a URI")
}

fn nbdkit(pki: &Pki, more: &[&str]) -> Server {
    let dir = format!("--tls-certificates={}", pki.dir().display());
    let args = ["--tls=require", &dir];
    Server::nbdkit(&[&args[..], more, &["memory", "2M"]].concat())
}

/// nbdkit and qemu-nbd use GnuTLS.
#[test]
fn all_is_as_without_tls() {
    let pki = Pki::new();
    let plain = NbdOptions::default();
    let server = nbdkit(&pki, &["--tls-verify-peer"]);
    exercise(&nbds(&server, pki.dir(), ""), &plain, 2, 2);
    let creds = format!(
        "tls-creds-x509,id=tls,endpoint=server,verify-peer=on,dir={}",
        pki.dir().display()
    );
    let args = ["--shared=8", "--object", &creds, "--tls-creds=tls"];
    let server = Server::qemu_nbd("raw", "2M", &args);
    let several = NbdOptions {
        connections: 3,
        ..plain
    };
    exercise(&nbds(&server, pki.dir(), ""), &several, 2, 2);
}

fn refuses(uri: &NbdUri) -> String {
    refused(uri, NbdOptions::default())
}

#[test]
fn wrong_certificates_of_servers_and_clients_are_refused() {
    let (pki, others) = (Pki::new(), Pki::new());
    let server = nbdkit(&pki, &["--tls-verify-peer"]);
    let line = refuses(&nbds(&server, others.dir(), ""));
    assert!(line.contains("TLS: invalid peer certificate"), "{line}");
    let line = refuses(&nbds(&server, pki.dir(), "&tls-hostname=elsewhere"));
    assert!(line.contains("TLS: invalid peer certificate"), "{line}");
    // Clients that trust the server, but have no certificate, or one of another authority.
    let stranger = tempfile::tempdir().expect("a directory");
    let path = |name: &str| stranger.path().join(name);
    std::fs::copy(pki.path("ca-cert.pem"), path("ca-cert.pem")).expect("copied");
    refuses(&nbds(&server, stranger.path(), ""));
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::copy(others.path(name), path(name)).expect("copied");
    }
    refuses(&nbds(&server, stranger.path(), ""));
    // Invalid certificate files.
    std::fs::write(path("ca-cert.pem"), "nothing").expect("written");
    let line = refuses(&nbds(&server, stranger.path(), ""));
    assert!(
        line.contains("ca-cert.pem: contains no certificate"),
        "{line}"
    );
    let line = refuses(&nbds(&server, Path::new("/nowhere"), ""));
    assert!(
        line.contains("/nowhere/ca-cert.pem: cannot read the file"),
        "{line}"
    );
    let line = refuses(&nbds(&server, pki.dir(), "&tls-hostname=a%20b"));
    assert!(line.contains("tls-hostname"), "{line}");
    // Servers without TLS, and clients without TLS.
    let plain = Server::nbdkit(&["memory", "2M"]);
    let line = refuses(&nbds(&plain, pki.dir(), ""));
    assert!(line.contains("does not support TLS; write nbd"), "{line}");
    let line = refuses(&server.uri());
    assert!(line.contains("requires TLS; write nbds"), "{line}");
}

/// Writes that are sent again after a loss use TLS, too.
#[test]
fn a_server_is_found_again_by_tls() {
    let pki = Pki::new();
    let mut server = nbdkit(&pki, &[]);
    let disk = NbdDisk::connect(&nbds(&server, pki.dir(), ""), NbdOptions::default());
    let disk = Arc::new(disk.expect("connected"));
    let mut guest = guest(&disk, EngineKind::IoUring);
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 3) as u8).collect();
    assert_eq!(guest.write(4096, &data), 0);
    assert_eq!(guest.write(0, &[9; 8192]), 0);
    server.kill();
    let dir = format!("--tls-certificates={}", pki.dir().display());
    server.restart(&["--tls=require", &dir, "memory", "2M"]);
    assert_eq!(guest.read(0, 8192).expect("read"), [9; 8192]);
    assert!(guest.read(8192, (1 << 20) - 4096).expect("read") == data[4096..]);
    guest.detach();
}
