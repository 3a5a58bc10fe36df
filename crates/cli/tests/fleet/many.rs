//! Tests `fathom fleet` with fifty hosts, and with some that are down.

use super::{fleet, host, nbd};
use crate::support::certificates::Certificates;
use crate::support::{Served, as_arg, disk_dir, run, stdout_of};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::thread;

const HOSTS: usize = 50;
/// Number of requests for each disk.
const N: u64 = 40;

/// Starts all hosts. Returns their servers and addresses. The disks of one host are slow.
fn start(certificates: &Certificates) -> Vec<(Served, String)> {
    let one = |n: usize| {
        let filter = match n {
            7 => "filters = ['delay:read=40ms']\n",
            _ => "",
        };
        let disk = |name: &str| {
            format!("[[disk]]\nname = '{name}'\nimage = 'memory:1M'\nnbd = true\n{filter}")
        };
        host(certificates, &[disk("a"), disk("b")].concat())
    };
    (0..HOSTS).map(one).collect()
}

fn count(summary: &Value) -> u64 {
    let read = summary["operations"]
        .as_array()
        .unwrap()
        .iter()
        .find(|op| op["op"] == "read");
    read.map_or(0, |read| {
        let total = read["stages"].as_array().unwrap().last().unwrap();
        total["count"].as_u64().unwrap()
    })
}

#[test]
fn fifty_servers_are_one_view_also_when_some_are_down() {
    let certificates = Certificates::new();
    let servers = start(&certificates);
    for (served, _) in &servers {
        let read = [
            "bench",
            "--rw",
            "randread",
            "--number-ios",
            "20",
            "--iodepth",
            "4",
            "--nbd",
        ];
        stdout_of(&[&read[..], &[&nbd(served, "a")]].concat());
        stdout_of(&[&read[..], &[&nbd(served, "b")]].concat());
    }
    // No server listens at the first address, the second server never replies, and the third speaks
    // another protocol.
    let nobody = "127.0.0.1:1".parse::<SocketAddr>().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let (hangs, strange) = (silent.local_addr().unwrap(), other.local_addr().unwrap());
    thread::spawn(move || {
        for client in other.incoming() {
            let _ = client.unwrap().write_all(b"220 mail.example ESMTP\r\n");
        }
    });
    let dir = disk_dir();
    let file = dir.path().join("hosts");
    let lines = servers.iter().map(|(_, address)| address.clone());
    let down = [nobody, hangs, strange].map(|address| format!("{address} # down"));
    fs::write(&file, lines.chain(down).collect::<Vec<_>>().join("\n")).unwrap();
    let hosts = as_arg(&file);
    let patience = ["--timeout", "8s"];
    let listed = fleet(&certificates, "list", &hosts, &patience);
    assert_eq!(listed["hosts"].as_array().unwrap().len(), HOSTS);
    let failed = |told: &Value| {
        let failed = told["failed"].as_array().unwrap().iter();
        failed
            .map(|one| one["host"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let mut down = [nobody, hangs, strange].map(|address| address.to_string());
    down.sort();
    assert_eq!(failed(&listed), down);
    // The command waited for the silent host, and for no other.
    for one in listed["failed"].as_array().unwrap() {
        let problem = one["problem"].as_str().unwrap();
        let has_waited = problem.contains("no reply within 8s");
        assert_eq!(has_waited, one["host"] == hangs.to_string(), "{problem}");
    }

    let told = fleet(
        &certificates,
        "stats",
        &hosts,
        &[&patience[..], &["--worst", "3"]].concat(),
    );
    assert_eq!(
        (told["hosts"].as_u64(), told["disks"].as_u64()),
        (Some(50), Some(100))
    );
    assert_eq!(failed(&told), down);
    // The total equals the sum of what each host reports itself.
    let own = servers.iter().map(|(served, _)| {
        let of_disk = |disk| {
            let said = stdout_of(&["stats", &served.api(), "--disk", disk, "--json"]);
            count(&serde_json::from_str(&said).unwrap())
        };
        of_disk("a") + of_disk("b")
    });
    assert_eq!(
        (count(&told["summary"]), own.sum::<u64>()),
        (HOSTS as u64 * N, HOSTS as u64 * N)
    );
    // 2 of 100 disks are slow, so the median is quick and p99 is slow.
    let total = told["summary"]["operations"][0]["stages"]
        .as_array()
        .unwrap()
        .last()
        .unwrap();
    let ns = |name: &str| total[name].as_f64().unwrap();
    assert!(ns("p50_ns") < 40e6 && ns("p99_ns") >= 39e6, "{total}");
    let worst: Vec<_> = told["worst"].as_array().unwrap().iter().collect();
    assert_eq!(worst.len(), 3);
    let slow = &worst[..2];
    for one in slow {
        assert_eq!(
            (one["host"].as_str(), one["count"].as_u64()),
            (Some(&*servers[7].1), Some(20))
        );
        assert_eq!(one["stage"], "queue");
    }
    assert_ne!(slow[0]["disk"], slow[1]["disk"]);

    top(&certificates, &hosts, &servers[7]);
    // The output for people reports the same failures.
    let client = certificates.path("client");
    let list = [
        "fleet",
        "list",
        "--hosts",
        &hosts,
        "--certificates",
        &client,
    ];
    let output = run(&[&list[..], &patience].concat());
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("3 of 53 hosts have not responded"), "{said}");
    assert!(
        said.contains(&format!("{nobody}: no server listens there")),
        "{said}"
    );
    assert!(
        said.contains(&format!("{hangs}: no reply within 8s")),
        "{said}"
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 101);
    hosts_that_are_down_hold_up_nobody(&certificates, &hosts);
    // The only host is down.
    let nobody = nobody.to_string();
    let top = [
        "fleet",
        "top",
        "--once",
        "--hosts",
        &nobody,
        "--certificates",
        &client,
    ];
    crate::support::refused(1, &top, &["no host has responded", &nobody]);
    crate::support::refused(
        1,
        &[
            "fleet",
            "stats",
            "--hosts",
            &nobody,
            "--certificates",
            &client,
        ],
        &[&nobody],
    );
}

/// Checks `fathom fleet top` for all hosts while one of them is busy.
fn top(certificates: &Certificates, hosts: &str, busy: &(Served, String)) {
    let uri = nbd(&busy.0, "b");
    let mut load = crate::support::fathom();
    load.args([
        "bench",
        "--rw",
        "randread",
        "--runtime",
        "1h",
        "--iodepth",
        "4",
        "--nbd",
        &uri,
    ]);
    let _load = crate::support::Kept::spawn(&mut load);
    crate::support::eventually("it is seen", || {
        let told = fleet(
            certificates,
            "top",
            hosts,
            &["--once", "--sort", "p99", "--interval", "1s"],
        );
        let servers = told["servers"].as_array().unwrap();
        if told["total"]["servers"] != HOSTS || told["total"]["disks"] != 2 * HOSTS {
            return None; // the machine is busy
        }
        assert_eq!(told["failed"].as_array().unwrap().len(), 3);
        let busy = servers.iter().find(|one| one["host"] == *busy.1)?;
        let is_b = |disk: &&Value| disk["name"] == "b";
        let disk = busy["disks"].as_array().unwrap().iter().find(is_b)?;
        let iops = disk["all"]["iops"].as_f64()?;
        let all = told["total"]["read_iops"].as_f64()?;
        (iops > 50.0 && (all - iops).abs() < 1e-6 && told["total"]["p50_us"].as_f64()? > 30e3)
            .then_some(())
    });
}

/// Hosts that are down are waited for only once.
fn hosts_that_are_down_hold_up_nobody(certificates: &Certificates, hosts: &str) {
    let client = certificates.path("client");
    let top = [
        "fleet",
        "top",
        "--json",
        "-n",
        "4",
        "--interval",
        "500ms",
        "--timeout",
        "5s",
    ];
    let told = stdout_of(&[&top[..], &["--hosts", hosts, "--certificates", &client]].concat());
    let times = told.lines().map(|line| {
        let told: Value = serde_json::from_str(line).unwrap();
        told["servers"][0]["time_ms"].as_u64().unwrap()
    });
    let times: Vec<_> = times.collect();
    assert_eq!(times.len(), 4);
    // The later intervals are not delayed, however long the first one was.
    assert!(times[3] - times[1] < 4000, "{times:?}");
}

/// A server may report any name, even one with control characters for the terminal.
#[test]
fn names_do_nothing_to_a_terminal() {
    let certificates = Certificates::new();
    let disk =
        "[[disk]]\nname = 'd'\nimage = 'memory:1M'\nnbd = true\nexport-name = \"\\u001b[2J\"\n";
    let (_served, address) = host(&certificates, disk);
    let client = certificates.path("client");
    let said = stdout_of(&[
        "fleet",
        "list",
        "--hosts",
        &address,
        "--certificates",
        &client,
    ]);
    assert!(said.contains("[2J") && !said.contains('\u{1b}'), "{said:?}");
    // A host that is given under two names is listed once.
    let port = address.rsplit(':').next().unwrap();
    let twice = format!("localhost:{port},LOCALHOST:{port}");
    let listed = fleet(&certificates, "list", &twice, &[]);
    assert_eq!(listed["hosts"].as_array().unwrap().len(), 1);
}
