//! Tests moves by TLS to a server whose disks run in sandboxed processes of their own.

use crate::pair::{Pair, changes, ends_well, guest};
use crate::support::certificates::Certificates;
use crate::support::{Served, as_arg, eventually, fathom, short_dir, stdout_of};
use serde_json::Value;
use std::fs;

fn serve(config: &str) -> Served {
    let dir = short_dir();
    let api = as_arg(&dir.path().join("c"));
    let socket = as_arg(&dir.path().join("s"));
    let config = config.replace("SOCKET", &socket);
    let config = format!("sandbox = 'on'\napi = {{ socket = '{api}' }}\n{config}");
    fs::write(dir.path().join("conf"), config).unwrap();
    let mut command = fathom();
    command
        .arg("serve")
        .arg("--config")
        .arg(dir.path().join("conf"));
    let mut served = Served::spawn(command, dir);
    served.wait_for("the API is at");
    served
}

fn phase(served: &Served) -> String {
    let shown = stdout_of(&["disk", "show", &served.api(), "--disk", "d", "--json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let phase = &shown["pull"]["phase"];
    phase.as_str().unwrap_or("none").to_owned()
}

#[test]
fn a_disk_goes_by_tls_from_one_cage_to_another() {
    let pair = Pair::new("raw", "qcow2");
    let certificates = Certificates::new();
    let (server, client) = (certificates.path("server"), certificates.path("client"));
    let dir = short_dir();
    let nbd = as_arg(&dir.path().join("n"));
    let source = serve(&format!(
        "[nbd]\nlisten = ['unix:{nbd}']\ntls-certificates = '{server}'\ntls-verify-peer = true\n\
         [[disk]]\nname = 'd'\nimage = '{}'\nvhost-user = 'SOCKET'\nnbd-move = true\n\
         filters = ['throttle']\n",
        pair.arg("from")
    ));
    let uri =
        format!("nbds+unix:///d?socket={nbd}&tls-certificates={client}&tls-hostname=localhost");
    let target = serve(&format!(
        "tenants = true\n[[disk]]\nname = 'd'\nimage = '{}'\nformat = 'qcow2'\nvhost-user = 'SOCKET'\n\
         pull = '{uri}'\n",
        pair.arg("to")
    ));
    let load = changes(&source);
    eventually("it is ready", || (phase(&target) == "ready").then_some(()));
    drop(load);
    ends_well(guest(&target));
    eventually("copied completely", || {
        (phase(&target) == "done").then_some(())
    });
    drop((source, target));
    pair.check_same();
}
