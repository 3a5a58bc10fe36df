//! Kills the serving process at random moments. As QEMU does, the front-end keeps the in-flight
//! area and passes it to the next process. Each request completes exactly once.
//!
//! This test has a program of its own, since the program starts itself again by the name of its
//! test.

mod support;

use fathom_core::testing::TestDisk;
use fathom_exports::VhostUser;
use fathom_exports::vhost_user::Options;
use fathom_sockets::Listener;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use support::guest::{DATA, IN, Memory, QUEUE_SIZE, Queue, eventually, negotiate};
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

const KILLS: u32 = 60;
const SLOTS: u16 = QUEUE_SIZE / 3;
const SOCKET: &str = "FATHOM_TEST_CRASH_SOCKET";
const THIS_TEST: &str = "nothing_is_lost_or_done_twice_by_kill_9";

/// The process that is killed. The process's disk takes a while for each request and completes
/// requests out of order; otherwise the used index alone would identify what is in flight.
fn serve(socket: PathBuf) {
    let listener = Listener::bind(&socket, Default::default()).unwrap();
    let disk = TestDisk::new();
    disk.out_of_order.store(true, SeqCst);
    let options = Options {
        max_queues: 2,
        ..Options::default()
    };
    let export = VhostUser::new(disk.clone(), disk.workers(2), options).unwrap();
    std::thread::spawn(move || {
        loop {
            disk.hold();
            std::thread::sleep(Duration::from_micros(100));
            disk.release();
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    export.serve(&listener).unwrap();
}

struct Server(Child);

impl Server {
    fn start(socket: &Path) -> Server {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", THIS_TEST, "--nocapture"])
            .env(SOCKET, socket)
            .stdout(std::process::Stdio::null())
            .spawn();
        Server(child.unwrap())
    }

    fn connect(&self, socket: &Path) -> Frontend {
        let mut stream = None;
        eventually("the server listens", || {
            stream = UnixStream::connect(socket).ok();
            stream.is_some()
        });
        Frontend::from_stream(stream.unwrap(), 2)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Sends SIGKILL.
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A queue that always has requests in flight.
struct Load {
    queue: Queue,
    free: Vec<u16>,
    sectors: [Option<u64>; SLOTS as usize],
    seen: u16,
    completed: u64,
    next_sector: u64,
}

impl Load {
    fn new(memory: &Arc<Memory>, index: usize) -> Load {
        Load {
            queue: Queue::new(memory, index),
            free: (0..SLOTS).collect(),
            sectors: [None; SLOTS as usize],
            seen: 0,
            completed: 0,
            next_sector: 0,
        }
    }

    fn data(&self, slot: u16) -> u64 {
        DATA + (self.queue.index as u64 * 64 + u64::from(slot)) * 512
    }

    fn submit(&mut self, n: usize) {
        for _ in 0..n {
            let Some(slot) = self.free.pop() else { break };
            let sector = self.next_sector;
            self.next_sector = (sector + 1) % 251;
            let data = self.data(slot);
            self.queue.memory.write(data, &[0; 512]);
            self.queue.offer(slot, IN, sector, data, 512);
            self.sectors[usize::from(slot)] = Some(sector);
        }
        self.queue.kick();
    }

    fn reap(&mut self) {
        let used = self.queue.used();
        while self.seen != used {
            let slot = self.queue.used_head(self.seen) / 3;
            let sector = self.sectors[usize::from(slot)].take();
            let sector = sector.expect("completed what was not in flight");
            assert_eq!(self.queue.status(slot), 0);
            let data = self.queue.memory.read(self.data(slot), 512);
            assert_eq!(data, vec![sector as u8 ^ 0x5a; 512]);
            self.free.push(slot);
            self.seen = self.seen.wrapping_add(1);
            self.completed += 1;
        }
    }

    fn in_flight(&self) -> usize {
        self.sectors.iter().flatten().count()
    }
}

#[test]
fn nothing_is_lost_or_done_twice_by_kill_9() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return serve(socket.into());
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let memory = Memory::new();
    let mut loads = [Load::new(&memory, 0), Load::new(&memory, 1)];
    let mut area: Option<(VhostUserInflight, File)> = None;
    let mut found_in_flight = 0;
    for round in 0..=KILLS {
        let server = Server::start(&socket);
        let mut frontend = server.connect(&socket);
        negotiate(&mut frontend, &memory);
        let (inflight, file) = area.get_or_insert_with(|| {
            let wanted = VhostUserInflight::new(0, 0, 2, QUEUE_SIZE);
            frontend.get_inflight_fd(&wanted).unwrap()
        });
        frontend
            .set_inflight_fd(inflight, file.as_raw_fd())
            .unwrap();
        for load in &mut loads {
            // The used index does not include requests in flight, which the area records.
            load.queue.start(&mut frontend, load.queue.used());
        }
        if round == KILLS {
            eventually("all that was in flight completes", || {
                loads.iter_mut().for_each(Load::reap);
                loads.iter().all(|load| load.in_flight() == 0)
            });
            break;
        }
        let mut go_on = || {
            for load in &mut loads {
                load.submit(1 + round as usize % 7);
                load.reap();
            }
            loads.each_ref().map(|load| load.completed)
        };
        // Every other process is killed early. On a busy machine, the others may take a while until
        // they complete requests.
        let before = go_on();
        eventually("it completes some of each", || {
            let after = go_on();
            round % 2 == 1 || (0..2).all(|i| after[i] > before[i] + 4)
        });
        let span = Duration::from_micros(u64::from(round * 7919 % 6000));
        let start = Instant::now();
        while start.elapsed() < span {
            go_on();
        }
        drop(server);
        found_in_flight += loads.iter().map(Load::in_flight).sum::<usize>();
    }
    assert!(loads.iter().all(|load| load.completed > 100));
    assert!(found_in_flight > 100, "{found_in_flight}");
}
