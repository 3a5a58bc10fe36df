//! A disk that a thread serves on a socket.

use super::guest::{DATA, IN, Memory, Queue, eventually, negotiate};
use fathom_core::testing::TestDisk;
use fathom_exports::VhostUser;
use fathom_exports::vhost_user::Options;
use fathom_sockets::Listener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;
use std::time::Duration;
use vhost::vhost_user::Frontend;

pub struct Served {
    pub disk: Arc<TestDisk>,
    pub export: Arc<VhostUser>,
    pub path: PathBuf,
    dir: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub fn new() -> Served {
        Served::with_queues(4)
    }

    pub fn with_queues(max_queues: u16) -> Served {
        let options = Options {
            max_queues,
            ..Options::default()
        };
        Served::at(tempfile::tempdir().unwrap(), options)
    }

    pub fn with_patience(patience: Duration) -> Served {
        let options = Options {
            max_queues: 4,
            patience,
            ..Options::default()
        };
        Served::at(tempfile::tempdir().unwrap(), options)
    }

    pub fn with_options(options: Options) -> Served {
        Served::at(tempfile::tempdir().unwrap(), options)
    }

    /// Stops serving, and serves a new disk at the same path.
    pub fn restart(&mut self) {
        let place = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        self.export.stop();
        self.join();
        let options = Options {
            max_queues: 4,
            ..Options::default()
        };
        *self = Served::at(place, options);
    }

    fn at(dir: tempfile::TempDir, options: Options) -> Served {
        let path = dir.path().join("vhost.sock");
        let listener = Listener::bind(&path, Default::default()).unwrap();
        let disk = TestDisk::new();
        let options = Options {
            serial: "test".into(),
            ..options
        };
        let workers = disk.workers(2);
        let export = Arc::new(VhostUser::new(disk.clone(), workers, options).unwrap());
        let thread = std::thread::spawn({
            let export = export.clone();
            move || export.serve(&listener).unwrap()
        });
        Served {
            disk,
            export,
            path,
            dir,
            thread: Some(thread),
        }
    }

    pub fn connect(&self) -> Frontend {
        Frontend::connect(&self.path, 4).unwrap()
    }

    /// Connects a front-end and starts the first queue of its guest.
    pub fn guest(&self) -> (Arc<Memory>, Frontend, Queue) {
        let memory = Memory::new();
        let mut frontend = self.connect();
        negotiate(&mut frontend, &memory);
        let queue = Queue::new(&memory, 0);
        queue.start(&mut frontend, 0);
        (memory, frontend, queue)
    }

    /// Makes the disk hold its requests, and has the guest read a sector into `DATA` as request 0.
    pub fn hold_a_read(&self, queue: &mut Queue, sector: u64) {
        self.disk.hold();
        queue.offer(0, IN, sector, DATA, 512);
        queue.kick();
        eventually("the request is held", || self.disk.held.load(SeqCst) == 1);
    }

    /// Waits for serving to end after a stop.
    pub fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    pub fn wait_for_disconnect(&self) {
        eventually("the connection is closed", || {
            self.export.status() == Default::default()
        });
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.export.stop();
        let ended = self.thread.take().map_or(Ok(()), JoinHandle::join);
        // Avoids a second panic while a test fails.
        if !std::thread::panicking() {
            ended.unwrap();
            assert_eq!(self.export.status(), Default::default());
            assert!(!self.disk.is_active());
        }
    }
}
