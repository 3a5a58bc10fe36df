//! Checks the limits for NBD clients.

use super::*;

#[test]
fn connections_have_a_bound() {
    let args = [
        "memory:1M",
        "--nbd",
        "unix:{dir}/n",
        "--nbd-connections",
        "2",
    ];
    let served = serve(&args);
    let mut holders = [
        Holder::new(&uri(&served, "")),
        Holder::new(&uri(&served, "")),
    ];
    for holder in &mut holders {
        holder.size();
    }
    let said = client_fails("qemu-img", &["info", &uri(&served, "")]);
    assert!(said.contains("2 connections"), "{said}");
    drop(holders);
    eventually("a place", || {
        let output = output_of("nbdinfo", &["--size", &uri(&served, "")]);
        output.status.success().then_some(())
    });
}

/// All connections to a Unix socket by the same user belong to one client.
#[test]
fn one_client_does_not_take_all_connections() {
    let served = serve(&[
        "memory:1M",
        "--nbd",
        "unix:{dir}/n",
        "--nbd",
        "tcp:127.0.0.1:0",
        "--nbd-connections",
        "40",
    ]);
    // Half of all connections.
    let mut holders: Vec<_> = (0..20).map(|_| Holder::new(&uri(&served, ""))).collect();
    for holder in &mut holders {
        holder.size();
    }
    let said = client_fails("qemu-img", &["info", &uri(&served, "")]);
    assert!(said.contains("has 20 connections"), "{said}");
    let log = served.log();
    let refusals = log.lines().filter(|line| line.contains("denied")).count();
    assert_eq!(refusals, 1, "{log}");
    // A TCP client is another client.
    let info = info(&served, "memory:1048576");
    let tcp = info["nbd"]["addresses"][1].as_str().unwrap();
    let tcp = format!("nbd://{}", tcp.strip_prefix("tcp:").unwrap());
    assert_eq!(size(&tcp), 1 << 20);
    drop(holders.pop());
    eventually("a place", || {
        let output = output_of("nbdinfo", &["--size", &uri(&served, "")]);
        output.status.success().then_some(())
    });
}

#[test]
fn a_limit_for_one_client_can_be_given() {
    let args = "memory:1M --nbd unix:{dir}/n --nbd-connections-per-client 2";
    let served = serve(&args.split(' ').collect::<Vec<_>>());
    let mut holders = [(); 2].map(|()| Holder::new(&uri(&served, "")));
    for holder in &mut holders {
        holder.size();
    }
    let said = client_fails("qemu-img", &["info", &uri(&served, "")]);
    assert!(said.contains("has 2 connections"), "{said}");
}

/// A client that sends requests stays connected, even if it is silent at the moment of a check. An
/// idle client, or a client that does not send the rest of a command, is disconnected.
#[test]
fn idle_connections_end_if_that_is_wanted() {
    let args = "memory:1M --nbd unix:{dir}/n --nbd-idle-timeout 2s";
    let served = serve(&args.split(' ').collect::<Vec<_>>());
    let script = "
import nbd, os, socket, struct, sys, time
def raw():
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(60)
    s.connect(os.environ['SOCKET'])
    s.recv(18, socket.MSG_WAITALL)
    s.sendall(struct.pack('>I8sII', 3, b'IHAVEOPT', 1, 0))
    s.recv(10, socket.MSG_WAITALL)
    return s
working, idle, owing = nbd.NBD(), raw(), raw()
working.connect_unix(os.environ['SOCKET'])
owing.sendall(struct.pack('>IHHQQI', 0x25609513, 0, 1, 1, 0, 512) + bytes(100))
for s in (idle, owing):
    s.settimeout(0.1)
    while True:
        working.pread(512, 0)
        try:
            assert s.recv(1) == b''
            break
        except TimeoutError:
            pass
working.pread(512, 0)
";
    crate::support::nbd::python(script, &[("SOCKET", &served.arg("n"))]);
    assert!(
        served
            .log()
            .contains("no request within --nbd-idle-timeout")
    );
}

/// Lines that the log leaves out are counted in other lines.
#[test]
fn refused_clients_do_not_fill_the_log() {
    const CLIENTS: u64 = 1500;
    let mut served = serve(&["memory:1M", "--nbd", "unix:{dir}/n"]);
    for _ in 0..CLIENTS {
        let mut client = std::os::unix::net::UnixStream::connect(served.path("n")).unwrap();
        // The client sends invalid flags, so the handshake fails. (The server may have disconnected
        // it already.)
        let _ = std::io::Write::write_all(&mut client, &[0xff; 4]);
        let _ = std::io::Read::read_to_end(&mut client, &mut Vec::new());
    }
    assert_eq!(served.terminate().0, Some(0));
    let log = served.log();
    let about = log.lines().filter(|line| line.contains("nbd: process"));
    let lines: Vec<_> = about.collect();
    let more = |line: &&str| -> Option<u64> {
        let (_, rest) = line.split_once("(and ")?;
        assert!(rest.contains(" more like this in the last "), "{line}");
        rest.split(' ').next()?.parse().ok()
    };
    let left_out: u64 = lines.iter().filter_map(more).sum();
    assert_eq!(lines.len() as u64 + left_out, CLIENTS, "{log}");
    assert!(left_out > CLIENTS / 2, "{left_out}");
}

#[test]
fn the_end_is_not_kept_waiting_by_clients() {
    let mut served = serve(&["memory:1M", "--nbd", "unix:{dir}/n"]);
    let mut holder = Holder::new(&uri(&served, ""));
    holder.size();
    // Clients that send nothing.
    let connect = || std::os::unix::net::UnixStream::connect(served.path("n")).unwrap();
    let _silent: Vec<_> = (0..10).map(|_| connect()).collect();
    assert_eq!(served.terminate().0, Some(0));
    let log = served.log();
    assert_eq!(log.matches("closed by the server").count(), 1, "{log}");
}

#[test]
fn silent_clients_give_way() {
    let served = serve(&["memory:1M", "--nbd", "unix:{dir}/n"]);
    // The server may be busy when clients connect.
    served.signal("STOP");
    let socket = SocketAddrUnix::new(served.path("n")).unwrap();
    let connect_at_once = || {
        let client = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::NONBLOCK,
            None,
        );
        let client = client.expect("a socket");
        connect(&client, &socket).expect("room to wait");
        client
    };
    let _silent: Vec<_> = (0..500).map(|_| connect_at_once()).collect();
    served.signal("CONT");
    for _ in 0..3 {
        assert_eq!(size(&uri(&served, "")), 1 << 20);
    }
    assert!(served.log().contains("closed during its handshake"));
}
