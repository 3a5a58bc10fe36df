//! Tests that hand over an export to a successor in various states of its front-end.

use crate::support::guest::{Memory, Queue, eventually, negotiate};
use crate::support::raw::Raw;
use crate::support::served::Served;
use fathom_core::testing::TestDisk;
use fathom_exports::vhost_user::{ExportState, Options, arrival};
use fathom_exports::{VhostUser, Visit};
use fathom_testing::PATIENCE;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Instant;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const GET_FEATURES: u32 = 1;
const SET_OWNER: u32 = 3;
const SET_VRING_CALL: u32 = 13;
const CONFIG_CHANGE: u32 = 2;

/// An export that has taken over from another one.
pub struct Successor {
    pub export: Arc<VhostUser>,
    thread: Option<JoinHandle<()>>,
}

impl Successor {
    /// Takes over as a process started by `fathom upgrade` does.
    pub fn of(served: &Served) -> Successor {
        let disk = TestDisk::new();
        let options = Options {
            max_queues: 4,
            ..Options::default()
        };
        let export = VhostUser::new(disk.clone(), disk.workers(2), options).unwrap();
        let export = Arc::new(export);
        let mut frozen = served.export.freeze().unwrap();
        let state = frozen.state.take().unwrap();
        let state: ExportState = through_json(&state);
        let (arriving, arrival) = arrival(state, std::mem::take(&mut frozen.descriptors));
        let thread = std::thread::spawn({
            let export = export.clone();
            move || export.serve_on(arrival).unwrap()
        });
        arriving.wait().unwrap();
        let bases = frozen.begin_halt().wait(Instant::now() + PATIENCE).unwrap();
        arriving.begin_to_activate(bases);
        arriving.wait().unwrap();
        frozen.let_go();
        arriving.run();
        Successor {
            export,
            thread: Some(thread),
        }
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.export.stop();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

fn through_json<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

/// Waits until the other side has received all bytes that were sent.
fn wait_until_received(socket: &UnixStream) {
    eventually("the bytes are received", || {
        let mut unread: libc::c_int = -1;
        // SAFETY: TIOCOUTQ writes one int.
        let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut unread) };
        assert_eq!(done, 0);
        unread == 0
    });
}

#[test]
fn unfinished_message_is_continued_by_the_successor() {
    let served = Served::new();
    let (_memory, frontend, mut queue) = served.guest();
    queue.check_read(0, 1);
    let mut raw = Raw::new(&frontend);
    let features = raw.request(GET_FEATURES, &[]);
    let message = Raw::header(GET_FEATURES, 9, 0);
    raw.0.write_all(&message[..5]).unwrap();
    wait_until_received(&raw.0);
    let successor = Successor::of(&served);
    raw.0.write_all(&message[5..]).unwrap();
    assert_eq!(raw.reply(GET_FEATURES), features);
    queue.check_read(1, 2);
    assert_eq!(successor.export.status().queues_running, 1);
    drop(frontend);
}

/// The file descriptor arrives with the first byte.
#[test]
fn descriptor_of_an_unfinished_message_reaches_the_successor() {
    for cut in [1, 12, 15] {
        let served = Served::new();
        let (_memory, frontend, mut queue) = served.guest();
        let call = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut message = Raw::header(SET_VRING_CALL, 9, 8);
        message.extend_from_slice(&0u64.to_ne_bytes());
        let mut raw = Raw::new(&frontend);
        raw.send_bytes(&message[..cut], &[call.as_raw_fd()]);
        wait_until_received(&raw.0);
        let successor = Successor::of(&served);
        raw.0.write_all(&message[cut..]).unwrap();
        assert_eq!(raw.reply(SET_VRING_CALL), 0u64.to_ne_bytes());
        assert!(call.read().is_ok(), "cut at {cut}");
        queue.check_read(0, 1);
        eventually("the interrupt", || call.read().is_ok());
        drop(frontend);
        drop(successor);
    }
}

#[test]
fn successor_continues_a_reply_on_the_back_channel() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let theirs = OwnedFd::from(theirs);
    frontend.set_backend_request_fd(&theirs).unwrap();
    drop(theirs);
    served.export.config_changed();
    let mut asked = [0; 12];
    ours.read_exact(&mut asked).unwrap();
    assert_eq!(asked[..4], CONFIG_CHANGE.to_ne_bytes());
    let mut reply = Raw::header(CONFIG_CHANGE, 5, 8);
    reply.extend_from_slice(&0u64.to_ne_bytes());
    ours.write_all(&reply[..1]).unwrap();
    wait_until_received(&ours);
    let successor = Successor::of(&served);
    ours.write_all(&reply[1..]).unwrap();
    // Further changes work only if the replies on the channel are in step.
    for _ in 0..3 {
        wait_until_received(&ours);
        successor.export.config_changed();
        ours.read_exact(&mut asked).unwrap();
        assert_eq!(asked[..4], CONFIG_CHANGE.to_ne_bytes());
        ours.write_all(&reply).unwrap();
    }
    let queue = Queue::new(&memory, 0);
    queue.describe(&frontend, 0);
}

#[test]
fn front_end_that_never_stops_sending_does_not_keep_its_export() {
    let served = Served::new();
    let mut raw = Raw::connect(&served.path);
    raw.request(GET_FEATURES, &[]);
    let stop = Arc::new(AtomicBool::new(false));
    let sender = std::thread::spawn({
        let stop = stop.clone();
        let messages = Raw::header(SET_OWNER, 1, 0).repeat(1000);
        move || {
            while !stop.load(SeqCst) {
                raw.0.write_all(&messages).unwrap();
            }
            raw.request(GET_FEATURES, &[]);
        }
    });
    for _ in 0..10 {
        drop(served.export.freeze().unwrap());
    }
    stop.store(true, SeqCst);
    sender.join().unwrap();
}

#[test]
fn abandoned_handover_reports_no_detached_front_end() {
    let served = Served::new();
    let (_memory, _frontend, mut queue) = served.guest();
    queue.check_read(0, 1);
    let is_detached = Arc::new(AtomicBool::new(false));
    let options = Options {
        max_queues: 4,
        watch: Some({
            let is_detached = is_detached.clone();
            Arc::new(move |visit, _| {
                is_detached.fetch_or(visit == Visit::Detached, SeqCst);
            })
        }),
        ..Options::default()
    };
    let disk = TestDisk::new();
    let export = VhostUser::new(disk.clone(), disk.workers(2), options).unwrap();
    let mut frozen = served.export.freeze().unwrap();
    let state = through_json(&frozen.state.take().unwrap());
    let (arriving, arrival) = arrival(state, std::mem::take(&mut frozen.descriptors));
    std::thread::scope(|scope| {
        scope.spawn(|| export.serve_on(arrival).unwrap());
        arriving.wait().unwrap();
        drop(arriving);
    });
    assert!(!is_detached.load(SeqCst));
    drop(frozen);
    queue.check_read(1, 2);
}
