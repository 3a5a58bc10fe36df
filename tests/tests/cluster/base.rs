//! Tests a base image on Ceph of which a host caches what it has read.

use std::process::{Child, Command, Stdio};

use fathom_testing::until;
use fathom_tests::ceph::Cluster;
use fathom_tests::{Place, fathom, run, run_command};

use super::{GIB, STEP};

struct Kept(Child);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_base_image_comes_from_a_cluster_and_stays_without_it() {
    let (place, mut cluster) = (Place::new(), Cluster::start(1, GIB));
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    let base = place.image("base.raw", 40 << 20);
    let base = base.to_str().unwrap();
    let image = cluster.image("base");
    let img = |args: &[&str]| {
        let ended = run(&[&["img"], args].concat(), STEP);
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    };
    let qemu_img = |args: &[&str]| {
        let mut command = Command::new("qemu-img");
        command.args(args);
        run_command(command, STEP)
    };
    // The image has data everywhere.
    let written = Command::new("sh")
        .args(["-c", "head -c 40M /dev/urandom >\"$0\"", base])
        .status();
    assert!(written.unwrap().success());
    img(&["convert", "-q", "-O", "raw", base, &image]);
    let (disk, nbd) = (path("disk.qcow2"), place.sockets().join("nbd"));
    img(&[
        "create", "-q", "-u", "-f", "qcow2", "-b", &image, "-F", "raw", &disk, "40M",
    ]);
    let uri = format!("nbd+unix:///?socket={}", nbd.display());
    let serve = || {
        let mut command = Command::new(fathom());
        command.args(["serve", &disk, "--format", "qcow2", "--base", &image]);
        command.args(["--base-cache", &path("cache"), "--base-fetch", "off"]);
        command.arg("--nbd").arg(format!("unix:{}", nbd.display()));
        command
            .args(["--server-reconnect", "2s"])
            .stderr(Stdio::null());
        let served = Kept(command.spawn().expect("fathom has been built"));
        until("an NBD server", || {
            qemu_img(&["info", &uri]).code == Some(0)
        });
        served
    };
    let same = || qemu_img(&["compare", "-f", "raw", "-F", "raw", base, &uri]);
    let served = serve();
    let compared = same();
    assert_eq!(
        compared.code,
        Some(0),
        "{}{}",
        compared.stdout,
        compared.stderr
    );
    // The cluster is gone; all data is in the cache.
    cluster.kill_osd(0);
    cluster.kill_monitor();
    assert_eq!(same().code, Some(0));
    drop(served);
    let served = serve();
    assert_eq!(same().code, Some(0));
    drop(served);
}
