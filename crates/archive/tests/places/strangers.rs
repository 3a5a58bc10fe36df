//! Independent server programs.

use crate::run;
use fathom_archive::{Error, Image, Manifest, Object, Writer};
use fathom_testing::eventually;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A running server program, whose output contains `before` followed by its port.
///
/// Dropping the value stops the program.
struct Server {
    child: Child,
    port: String,
    dir: TempDir,
}

impl Server {
    fn start(program: &Path, args: &[&str], before: &str) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let logs = ["out", "err"].map(|name| dir.path().join(name));
        fs::create_dir(dir.path().join("files")).unwrap();
        let mut command = Command::new(program);
        command
            .args(args)
            .current_dir(dir.path().join("files"))
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::null())
            .stdout(File::create(&logs[0]).unwrap())
            .stderr(File::create(&logs[1]).unwrap());
        let child = command.spawn().expect("it is installed by `make setup`");
        let mut server = Server {
            child,
            port: String::new(),
            dir,
        };
        server.port = eventually(&format!("the port of {program:?}"), || {
            logs.iter().find_map(|log| {
                let said = fs::read_to_string(log).unwrap();
                let (_, rest) = said.split_once(before)?;
                // The server may not have written the whole line yet.
                let end = rest.find(|c: char| !c.is_ascii_digit())?;
                (end > 0).then(|| rest[..end].to_owned())
            })
        });
        server
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("files").join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn venv(program: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("../venv/bin")
        .join(program)
}

fn content() -> Vec<u8> {
    (0..300_000_u32).map(|at| (at / 11) as u8).collect()
}

#[test]
fn a_web_server_that_knows_ranges_has_disks() {
    let args = ["-m", "RangeHTTPServer", "--bind", "127.0.0.1", "0"];
    let server = Server::start(&venv("python3"), &args, " port ");
    fs::write(server.file("a disk.raw"), content()).unwrap();
    let object = run(Object::open(&format!("{}/a%20disk.raw", server.url()))).unwrap();
    assert_eq!(object.size(), 300_000);
    for (offset, len) in [(0, 1), (12_345, 70_000), (299_999, 1)] {
        let read = run(object.read(offset, len)).unwrap();
        assert_eq!(read, content()[offset as usize..][..len]);
    }
    // The new contents have the same length and a later modification time.
    let mut other = content();
    other[0] ^= 1;
    fs::write(server.file("a disk.raw"), other).unwrap();
    let later = std::time::SystemTime::now() + Duration::from_secs(10);
    let file = File::options().write(true).open(server.file("a disk.raw"));
    file.unwrap().set_modified(later).unwrap();
    let error = run(object.read(0, 1)).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
}

#[test]
fn a_web_server_that_knows_no_ranges_is_refused() {
    let args = ["-m", "http.server", "--bind", "127.0.0.1", "0"];
    let server = Server::start(Path::new("python3"), &args, " port ");
    fs::write(server.file("disk.raw"), content()).unwrap();
    let error = run(Object::open(&format!("{}/disk.raw", server.url()))).unwrap_err();
    assert!(error.to_string().contains("range requests"), "{error}");
    let error = run(Object::open(&format!("{}/other.raw", server.url()))).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
}

const MOTO: &str = "FATHOM_TEST_MOTO";

/// Starts the test program again with the environment variables of an S3 client.
#[test]
fn a_bucket_has_disks_and_archives() {
    if std::env::var_os(MOTO).is_some() {
        return as_client();
    }
    let server = Server::start(&venv("moto_server"), &["-p", "0"], "://127.0.0.1:");
    let test = std::env::current_exe().unwrap();
    let output = Command::new(test)
        .args([
            "--exact",
            "strangers::a_bucket_has_disks_and_archives",
            "--nocapture",
        ])
        .env(MOTO, server.url())
        .env("AWS_ENDPOINT_URL", server.url())
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "secret")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

fn curl(args: &[&str], path: &str) {
    let url = format!("{}/{path}", std::env::var(MOTO).unwrap());
    let mut curl = Command::new("curl");
    curl.args([
        "-sSf",
        "--user",
        "key:secret",
        "--aws-sigv4",
        "aws:amz:us-east-1:s3",
    ]);
    let output = curl.args(args).arg(url).output().unwrap();
    assert!(output.status.success(), "{path}: {output:?}");
}

fn as_client() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    fs::write(&file, content()).unwrap();
    let file = file.to_str().unwrap();
    curl(&["-X", "PUT"], "bucket");
    curl(&["-T", file], "bucket/disks/disk.raw");
    run(async {
        let object = Object::open("s3://bucket/disks/disk.raw").await.unwrap();
        assert_eq!(object.size(), 300_000);
        assert_eq!(
            object.read(12_345, 70_000).await.unwrap(),
            content()[12_345..82_345]
        );
        fs::write(file, &content()[1..]).unwrap();
        curl(&["-T", file], "bucket/disks/disk.raw");
        let error = object.read(0, 1).await.unwrap_err();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
        curl(&["-X", "DELETE"], "bucket/disks/disk.raw");
        let error = object.read(0, 1).await.unwrap_err();
        assert!(matches!(error, Error::NotFound { .. }), "{error}");

        // Both writers have found that the image does not exist.
        let (one, two) = (
            Writer::open("s3://bucket/x").unwrap(),
            Writer::open("s3://bucket/x").unwrap(),
        );
        let stripe = content()[..65_536].to_vec();
        let put = one.put(stripe.clone()).await.0.unwrap();
        assert!(put.stored.is_some());
        assert_eq!(two.put(stripe.clone()).await.0.unwrap().stored, None);
        let manifest = Manifest::new(65_536, 65_536, vec![Some(put.hash)], vec![], 1).unwrap();
        one.finish("image", &manifest, false).await.unwrap();
        let error = two.finish("image", &manifest, false).await.unwrap_err();
        assert!(matches!(error, Error::Exists { .. }), "{error}");
        let image = Image::open("s3://bucket/x/images/image.manifest")
            .await
            .unwrap();
        assert_eq!(image.stripe(0).await.unwrap(), stripe);
    });
}
