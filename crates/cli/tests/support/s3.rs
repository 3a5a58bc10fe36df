//! An S3 bucket on a server of moto.

use super::{Kept, eventually, fathom};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

pub struct S3 {
    pub url: String,
    _server: Kept,
    _dir: TempDir,
}

/// The environment variables that configure a client.
const KEYS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "key"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_REGION", "us-east-1"),
];

impl S3 {
    /// Starts a server with a bucket called `bucket`.
    pub fn start(args: &[&str]) -> S3 {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../venv/bin/moto_server");
        // On a busy machine, the store must still reply within the server's timeout. Without root,
        // `nice` starts the program with the usual priority.
        let mut moto = Command::new("nice");
        moto.args(["-n", "-10"])
            .arg(program)
            .args(["-p", "0"])
            .args(args)
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap());
        let server = Kept(moto.spawn().expect("moto is installed by `make setup`"));
        let url = eventually("moto runs", || {
            let said = fs::read_to_string(&log).unwrap();
            let (_, rest) = said.split_once("Running on ")?;
            rest.split_once('\n').map(|(url, _)| url.trim().to_owned())
        });
        let s3 = S3 {
            url,
            _server: server,
            _dir: dir,
        };
        s3.curl(&["-X", "PUT"], "bucket");
        s3
    }

    pub fn curl(&self, args: &[&str], path: &str) -> Vec<u8> {
        let mut curl = Command::new("curl");
        curl.args(["-sSfk", "--noproxy", "*", "--user", "key:secret"]);
        curl.args(["--aws-sigv4", "aws:amz:us-east-1:s3"])
            .args(args);
        let output = curl.arg(format!("{}/{path}", self.url)).output().unwrap();
        assert!(output.status.success(), "{path}: {output:?}");
        output.stdout
    }

    /// Returns a `fathom` command that uses this server.
    pub fn fathom(&self) -> Command {
        let mut command = fathom();
        command
            .envs(KEYS)
            .env("AWS_ENDPOINT_URL", &self.url)
            .env("AWS_ALLOW_HTTP", "true")
            .env("NO_PROXY", "127.0.0.1,localhost");
        command
    }
}
