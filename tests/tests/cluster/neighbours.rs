//! Tests that a host's measurements show the load of another host on the same cluster.

use std::fs::File;
use std::process::{Child, Command};

use fathom_lab::Server;
use fathom_tests::ceph::Cluster;
use fathom_tests::moves::make_certificates;
use fathom_tests::{Place, fathom, run};

use super::{GIB, QUEUES, STEP, serve, wait};

/// An agent that waits for clients, and then loads a server's disk.
struct Agent {
    child: Child,
    address: String,
}

impl Agent {
    fn start(place: &Place, name: &str, server: &Server) -> Agent {
        let log = place.path(&format!("{name}.agent"));
        let mut command = Command::new(fathom());
        command.args(["bench", "--serve", "127.0.0.1:0", "--certificates"]);
        command
            .arg(place.path("tls"))
            .arg("--vhost-user")
            .arg(server.socket());
        let child = command.stderr(File::create(&log).unwrap()).spawn().unwrap();
        let mut agent = Agent {
            child,
            address: String::new(),
        };
        wait("the agent's port", || {
            let said = std::fs::read_to_string(&log).unwrap();
            let port = said
                .split("by TLS at 127.0.0.1:")
                .nth(1)
                .and_then(|at| at.split_once('\n'));
            agent.address = port.map_or_else(String::new, |(port, _)| format!("localhost:{port}"));
            port.is_some()
        });
        agent
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_neighbours_writes_are_seen_in_what_a_host_measures() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    make_certificates(&place.path("tls"));
    let names = ["quiet", "loud"];
    let servers = names.map(|name| {
        cluster.rbd(&["create", "--size", "64M", &format!("rbd/{name}")]);
        serve(&place, &cluster, name, QUEUES)
    });
    let agents = [0, 1].map(|n| Agent::start(&place, names[n], &servers[n]));
    let tls = place.path("tls");
    let noise = format!("--noise={}", agents[1].address);
    let args = [
        "bench",
        "--client",
        &agents[0].address,
        &noise,
        "--certificates",
        tls.to_str().unwrap(),
        "--rw=randwrite",
        "--size=16M",
        "--iodepth=2",
        "--runtime=4s",
        "--rounds=2",
        "--noise-rw=randwrite",
        "--noise-iodepth=32",
        "--json",
    ];
    let ended = run(&args, STEP);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let told: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let of = |figure: &str, name: &str| told["operations"][0][figure][name].as_f64().unwrap();
    // The only OSD executes about one request at a time.
    assert!(
        of("iops", "median") < 0.9 && of("p50", "median") > 1.1,
        "{told}"
    );
    assert!(of("iops", "beside") > 1.0, "{told}");
    drop(agents);
    for server in servers {
        server.stop().unwrap();
    }
}
