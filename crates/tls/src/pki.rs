//! Certificates for tests.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A certificate authority with certificates for a server called `localhost` and its clients.
///
/// The files are in a directory laid out as for nbdkit and QEMU.
pub struct Pki {
    dir: TempDir,
    ca: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    /// Creates the authority and the certificates in a temporary directory.
    ///
    /// # Panics
    /// Panics if the files cannot be written.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Pki {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let ca = CertifiedIssuer::self_signed(params, key).expect("an authority");
        let dir = tempfile::tempdir().expect("a directory");
        let pki = Pki { dir, ca };
        pki.write("ca-cert.pem", &pki.ca.pem());
        pki.issue("server");
        pki.issue("client");
        pki
    }

    fn issue(&self, who: &str) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["localhost".into()]).expect("a name");
        let cert = params.signed_by(&key, &self.ca).expect("signed");
        self.write(&format!("{who}-cert.pem"), &cert.pem());
        self.write(&format!("{who}-key.pem"), &key.serialize_pem());
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("written");
    }

    /// Returns the path of a file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Returns the temporary directory with the files, which is removed on drop.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the authority, for certificates that a test issues itself.
    pub fn ca(&self) -> &CertifiedIssuer<'static, KeyPair> {
        &self.ca
    }
}
