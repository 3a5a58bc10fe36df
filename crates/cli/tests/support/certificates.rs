//! Certificates for TLS.

use super::nbd::prints;
use super::{as_arg, disk_dir};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// Certificates in the directories that nbdkit, libnbd and QEMU expect:
/// `server`, `client`, and `stranger`, whose client certificate another
/// authority has signed.
pub struct Certificates(TempDir);

impl Certificates {
    pub fn new() -> Certificates {
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
        // A client that trusts the server and has no certificate of its own.
        let anonymous = certificates.dir("anonymous");
        fs::copy(
            certificates.dir("ours").join("ca-cert.pem"),
            anonymous.join("ca-cert.pem"),
        )
        .unwrap();
        certificates
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        let dir = self.0.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Creates a key in `directory` with a certificate for `role`.
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
        // Every directory trusts our authority.
        let ours = self.dir("ours").join("ca-cert.pem");
        fs::copy(ours, dir.join("ca-cert.pem")).unwrap();
    }

    pub fn path(&self, name: &str) -> String {
        as_arg(&self.dir(name))
    }
}
