//! Tests dirty bitmaps of images on a cluster, backups of such images, and backups to a cluster.

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use fathom_lab::Server;
use fathom_tests::ceph::Cluster;
use fathom_tests::{Place, run, run_command};

use super::{GIB, QUEUES, STEP, bench, create, qemu_img, wait};

fn fathom(args: &[&str]) -> String {
    let ended = run(args, STEP);
    let told = format!("{args:?}: {}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "{told}");
    ended.stdout
}

/// A disk on the cluster, whose bitmaps are in a local directory.
struct Series<'a> {
    place: &'a Place,
    image: String,
    format: &'static str,
    bitmaps: String,
}

/// A server of the disk, and a front-end that reads all the time.
struct InUse {
    server: Server,
    reader: Child,
    nbd: String,
}

impl InUse {
    fn api(&self) -> &str {
        self.server.api().expect("it has one").to_str().unwrap()
    }

    /// Writes by NBD while the front-end is connected, once the disk is in use.
    fn write(&self, at: &str) {
        let uri = format!("nbd+unix:///d?socket={}", self.nbd);
        let change = format!("write -P 7 {at} 300k");
        wait("a write beside the front-end", || {
            let mut command = Command::new("qemu-io");
            command.args(["-f", "raw", "-c", &change, &uri]);
            run_command(command, STEP).code == Some(0)
        });
    }

    fn stop(mut self) {
        self.reader.kill().unwrap();
        self.reader.wait().unwrap();
        self.server.stop().unwrap();
    }
}

impl Series<'_> {
    fn serve(&self) -> InUse {
        let nbd = self
            .place
            .sockets()
            .join("nbd")
            .to_str()
            .unwrap()
            .to_owned();
        let address = format!("unix:{nbd}");
        let args = ["--format", self.format, "--bitmaps", &self.bitmaps];
        let args = [QUEUES, &args, &["--nbd", &address, "--export-name", "d"]].concat();
        let server = self.place.serve(self.format, Path::new(&self.image), &args);
        let none = self.place.path("none");
        let mut reader = bench(&server, &none, &["--rw=randread", "--runtime=300s"]);
        // The lock is denied while the cluster considers a killed server alive.
        wait("a front-end that stays", || {
            std::thread::sleep(Duration::from_secs(1));
            let is_there = reader.try_wait().unwrap().is_none();
            if !is_there {
                reader = bench(&server, &none, &["--rw=randread", "--runtime=300s"]);
            }
            is_there
        });
        InUse {
            server,
            reader,
            nbd,
        }
    }

    fn file(&self, name: &str) -> String {
        let path = self.place.path(&format!("{}.{name}", self.format));
        path.to_str().unwrap().to_owned()
    }

    /// Backs up the present contents of the disk.
    fn backup(&self, disk: &InUse, how: &str, target: &str, more: &[&str]) {
        let scratch = self.place.path("");
        let scratch = ["--scratch", scratch.to_str().unwrap()];
        let args = ["backup", how, disk.api(), target, "--verify", "--quiet"];
        fathom(&[&args[..], &scratch, more].concat());
    }

    /// Lists the bitmaps while no server serves the disk: their names, and whether their contents
    /// are known.
    fn bitmaps(&self) -> Vec<(String, bool)> {
        let args = [
            "img",
            "bitmap",
            "--list",
            "--json",
            "--bitmaps",
            &self.bitmaps,
        ];
        let said = fathom(&[&args[..], &["-f", self.format, &self.image]].concat());
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        let one = |one: &serde_json::Value| {
            let is_known = one["count"].is_u64() && one["problem"].is_null();
            (one["name"].as_str().unwrap().to_owned(), is_known)
        };
        said.as_array().unwrap().iter().map(one).collect()
    }
}

#[test]
fn an_image_is_backed_up_again_and_again() {
    let (place, cluster) = (Place::new(), Cluster::start(1, 2 * GIB));
    for format in ["raw", "qcow2"] {
        create(&place, &cluster, format, format);
        let bitmaps = place.path(&format!("{format}.bitmaps"));
        let series = Series {
            place: &place,
            image: cluster.image(format),
            format,
            bitmaps: bitmaps.to_str().unwrap().to_owned(),
        };
        let [full, first, second, third] =
            ["full", "first", "second", "third"].map(|name| series.file(name));
        let incremental = |disk: &InUse, target: &str, base: &str| {
            let more = ["--bitmap", "b", "--base", base];
            series.backup(disk, "incremental", target, &more);
        };
        let disk = series.serve();
        disk.write("1M");
        series.backup(&disk, "full", &full, &["--bitmap", "b"]);
        disk.write("3M");
        incremental(&disk, &first, &full);
        disk.stop();
        assert_eq!(series.bitmaps(), [("b".to_owned(), true)], "{format}");
        // The successor of a killed server has all that the bitmap recorded.
        let mut disk = series.serve();
        disk.write("5M");
        if format == "qcow2" {
            disk.server.process().kill().unwrap();
            disk.reader.kill().unwrap();
            disk.reader.wait().unwrap();
            drop(disk);
        } else {
            disk.stop();
        }
        let disk = series.serve();
        disk.write("7M");
        let known = fathom(&["bitmap", "list", disk.api(), "--json"]);
        assert!(known.contains("\"problem\":null"), "{known}");
        incremental(&disk, &second, &first);
        // A copy on the cluster is created, but an existing image is not overwritten.
        let copy = cluster.image(&format!("{format}-copy"));
        series.backup(&disk, "full", &copy, &["-O", format]);
        let again = ["backup", "full", disk.api(), &copy, "-O", format];
        run(&again, STEP).refused_with(&["exists already"]);
        disk.stop();
        let qemus = cluster.for_qemu(&format!("{format}-copy"));
        qemu_img(&["compare", "-f", "qcow2", "-F", format, &second, &qemus]);
        if format == "qcow2" {
            // QEMU continues to use the image, and the bitmap is still complete.
            let image = cluster.for_qemu(format);
            qemu_io(&image);
            let disk = series.serve();
            disk.write("9M");
            incremental(&disk, &third, &second);
            disk.stop();
            qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", &third, &image]);
        }
    }
}

fn qemu_io(image: &str) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2", "-c", "write -P 9 5M 1M", image]);
    let ended = run_command(command, STEP);
    assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
}
