//! TLS with the clients of libnbd and QEMU, both of which use GnuTLS.

use super::support::nbd::{Nbd, prints, tool};
use super::support::{as_arg, disk_dir};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Certificates in the directories that nbdkit, libnbd and QEMU expect:
/// `server`, `client`, and `stranger`, whose client certificate another
/// authority has signed.
struct Certificates(TempDir);

impl Certificates {
    fn new() -> Certificates {
        let certificates = Certificates(disk_dir());
        for authority in ["ours", "others"] {
            let dir = certificates.dir(authority);
            let subject = format!("/CN={authority}");
            let new = [
                "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2",
            ];
            let files = [
                "-keyout",
                "ca-key.pem",
                "-out",
                "ca-cert.pem",
                "-subj",
                &subject,
            ];
            prints(&dir, "openssl", &[&new[..], &files].concat());
        }
        certificates.sign("server", "server", "ours");
        certificates.sign("client", "client", "ours");
        certificates.sign("stranger", "client", "others");
        // A client that trusts the server and has nothing to show for itself.
        let anonymous = certificates.dir("anonymous");
        fs::copy(
            certificates.dir("ours").join("ca-cert.pem"),
            anonymous.join("ca-cert.pem"),
        )
        .unwrap();
        certificates
    }

    fn dir(&self, name: &str) -> PathBuf {
        let dir = self.0.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// A key in `directory` with a certificate for `role`.
    fn sign(&self, directory: &str, role: &str, authority: &str) {
        let dir = self.dir(directory);
        let authority = self.dir(authority);
        let (cert, key) = (format!("{role}-cert.pem"), format!("{role}-key.pem"));
        let request = [
            "req", "-nodes", "-newkey", "rsa:2048", "-out", "request", "-subj",
        ];
        prints(
            &dir,
            "openssl",
            &[
                &request[..],
                &[&format!("/CN={directory}"), "-keyout", &key],
            ]
            .concat(),
        );
        let usage = format!(
            "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={role}Auth\n\
             basicConstraints=CA:FALSE\nkeyUsage=digitalSignature,keyEncipherment\n"
        );
        fs::write(dir.join("usage"), usage).unwrap();
        let (ca, ca_key) = (
            as_arg(&authority.join("ca-cert.pem")),
            as_arg(&authority.join("ca-key.pem")),
        );
        let sign = [
            "x509",
            "-req",
            "-in",
            "request",
            "-CA",
            &ca,
            "-CAkey",
            &ca_key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            "usage",
            "-out",
            &cert,
        ];
        prints(&dir, "openssl", &sign);
        // Everybody here trusts our authority.
        let ours = self.dir("ours").join("ca-cert.pem");
        fs::copy(ours, dir.join("ca-cert.pem")).unwrap();
    }

    fn path(&self, name: &str) -> String {
        as_arg(&self.dir(name))
    }
}

fn serve(certificates: &Certificates, args: &[&str]) -> Nbd {
    let tls = ["--tls-certificates", &certificates.path("server")];
    Nbd::start("memory:16M", &[&tls, args].concat())
}

/// libnbd's URI with TLS.
fn nbds(nbd: &Nbd, certificates: &str) -> String {
    let socket = nbd.arg("s");
    format!("nbds+unix:///?socket={socket}&tls-certificates={certificates}&tls-hostname=localhost")
}

fn reaches(dir: &Path, uri: &str) -> bool {
    let output = tool(dir, "nbdinfo", &["--size", uri]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        !output.status.success() || said.trim() == "16777216",
        "{said}"
    );
    output.status.success()
}

/// QEMU's node for the export, by certificates in a directory.
fn qemu(nbd: &Nbd, certificates: &str, args: &[&str]) -> bool {
    let object = format!("tls-creds-x509,id=tls,dir={certificates},endpoint=client");
    let image = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},\
         file.tls-creds=tls,file.tls-hostname=localhost",
        nbd.arg("s")
    );
    let all = [&["--object", &object, "--image-opts", &image], args].concat();
    let output = tool(Path::new("/"), "qemu-io", &all);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!said.contains("failed"), "{said}");
    output.status.success()
}

const WRITE_AND_READ: [&str; 6] = [
    "-c",
    "write -P 7 1M 3M",
    "-c",
    "write -z 2M 1M",
    "-c",
    "read -P 7 3M 1M",
];

#[test]
fn tls_is_required_or_for_those_who_want_it_or_off() {
    let certificates = Certificates::new();
    let dir = certificates.dir("work");
    let (client, anonymous) = (certificates.path("client"), certificates.path("anonymous"));

    let required = serve(&certificates, &[]);
    assert!(!reaches(&dir, &required.uri()));
    assert!(reaches(&dir, &nbds(&required, &client)));
    assert!(reaches(&dir, &nbds(&required, &anonymous)));
    assert!(qemu(&required, &client, &WRITE_AND_READ));
    let said = tool(&dir, "qemu-img", &["info", &required.uri()]);
    assert!(!said.status.success());
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("TLS"), "{said}");

    let optional = serve(&certificates, &["--tls", "on"]);
    assert!(reaches(&dir, &optional.uri()));
    assert!(reaches(&dir, &nbds(&optional, &client)));

    let off = Nbd::start("memory:16M", &[]);
    assert!(!reaches(&dir, &nbds(&off, &client)));
    assert!(reaches(&dir, &off.uri()));
    assert!(!qemu(&off, &client, &WRITE_AND_READ));
}

#[test]
fn clients_show_a_certificate_where_that_is_demanded() {
    let certificates = Certificates::new();
    let dir = certificates.dir("work");
    let nbd = serve(&certificates, &["--tls-verify-peer"]);
    for (who, admitted) in [("client", true), ("stranger", false), ("anonymous", false)] {
        let directory = certificates.path(who);
        assert_eq!(
            reaches(&dir, &nbds(&nbd, &directory)),
            admitted,
            "{who}, libnbd"
        );
        assert_eq!(
            qemu(&nbd, &directory, &WRITE_AND_READ),
            admitted,
            "{who}, QEMU"
        );
    }
    assert!(!reaches(&dir, &nbd.uri()));
}

/// In both directions, more than what fits any buffer, by several connections.
#[test]
fn data_passes_tls_unharmed() {
    let certificates = Certificates::new();
    let dir = certificates.dir("work");
    let nbd = serve(&certificates, &["--iothreads", "2"]);
    let uri = nbds(&nbd, &certificates.path("client"));
    let data: Vec<u8> = (0..4u32 << 20)
        .flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_be_bytes())
        .collect();
    fs::write(dir.join("in"), &data).unwrap();
    prints(&dir, "nbdcopy", &["--connections=2", "in", &uri]);
    prints(&dir, "nbdcopy", &["--connections=2", &uri, "out"]);
    assert!(fs::read(dir.join("out")).unwrap() == data);
    let script = format!(
        "{}h = connect(); assert h.get_tls_negotiated(); h.flush(); h.shutdown()",
        super::commands::PRELUDE
    );
    super::support::nbd::python(&script, &[("URI", &uri)]);
}
