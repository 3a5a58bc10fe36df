//! Tests TLS with the clients of libnbd and QEMU, both of which use GnuTLS.

use super::support::certificates::Certificates;
use super::support::nbd::{Nbd, make_image, prints, tool};
use super::support::{
    Kept, Served, as_arg, eventually, fathom, listens, refused, short_dir, stdout_of,
};
use std::fs;
use std::path::Path;
use std::time::Duration;

fn serve(certificates: &Certificates, args: &[&str]) -> Nbd {
    let tls = ["--tls-certificates", &certificates.path("server")];
    Nbd::start("memory:16M", &[&tls, args].concat())
}

/// Returns libnbd's URI with TLS.
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

/// Runs qemu-io on the export, with the certificates in a directory.
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

/// Transfers more than any buffer holds, in both directions and on several connections.
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

/// The supervisor reads the certificates for its sandboxed tenant.
///
/// The server is killed under a load that verifies what it reads.
#[test]
fn a_disk_of_a_tenant_is_reached_by_tls_again_and_again() {
    let (certificates, dir) = (Certificates::new(), short_dir());
    let image = make_image(&certificates.dir("work"), "raw", 64 << 20);
    let (socket, control) = (dir.path().join("o"), as_arg(&dir.path().join("c")));
    let (nbd, own) = (
        format!("unix:{}", as_arg(&socket)),
        certificates.path("server"),
    );
    let start = || {
        let mut command = fathom();
        command.args(["serve", &image, "--nbd", &nbd, "--api", &control]);
        command.args(["--tls-certificates", &own, "--tls-verify-peer"]);
        let origin = Kept::spawn(&mut command);
        eventually("the origin listens", || listens(&socket).then_some(()));
        origin
    };
    let mut origin = start();
    let mut served = Served::waiting("", "");
    let api = served.api();
    let (client, stranger) = (certificates.path("client"), certificates.path("stranger"));
    let uri = |who: &str| {
        format!(
            "nbds+unix:///?socket={}&tls-certificates={who}",
            as_arg(&socket)
        )
    };
    let add = ["disk", "add", "--server", &api];
    // A side that closes a connection with unread data may discard the last message that it has
    // sent.
    let lines = ["handshake"];
    refused(1, &[&add[..], &["far", &uri(&stranger)]].concat(), &lines);
    stdout_of(&[&add[..], &["far", &uri(&client)]].concat());
    let far = format!("nbd+unix:///far?socket={}", served.arg("n"));
    let mut load = fathom();
    load.args([
        "bench",
        "--nbd",
        &far,
        "--rw",
        "randrw",
        "--iodepth",
        "32",
        "--verify",
    ]);
    let mut load = Kept::spawn(load.args(["--runtime", "600s", "--ramp-time", "0"]));
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(300));
        assert!(load.0.try_wait().unwrap().is_none(), "the load has ended");
        drop(origin);
        fs::remove_file(&socket).unwrap();
        origin = start();
        served.wait_for("connected again");
    }
    load.signal("INT");
    assert!(load.0.wait().unwrap().success());
    let log = served.log();
    assert!(!log.contains("input/output error"), "{log}");
    drop(origin);
}
