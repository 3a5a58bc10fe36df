//! A connection of NBD's transmission phase, from both ends.
#![allow(dead_code)] // each test uses some of it

pub mod client;
pub mod disks;

use client::Client;
use fathom_core::{Disk, Polling, WorkerHandle, WorkerOptions};
use fathom_exports::nbd::connection::{
    Activity, Agreed, Described, Ending, ExportView, Limits, NbdSource, OnEnd, Stream,
};
use fathom_nbd::protocol::Replies;
use fathom_sockets::Descriptors;
use fathom_storage::{EngineKind, engine};
use fathom_testing::PATIENCE;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

pub fn worker(disk: &Arc<dyn Disk>, kind: EngineKind) -> WorkerHandle {
    let options = WorkerOptions {
        name: "nbd".into(),
        polling: Polling::Auto,
        cpus: Vec::new(),
    };
    WorkerHandle::spawn(disk.clone(), move || engine(kind), options).expect("a worker")
}

/// The server's side of a connection.
pub struct Served<'a> {
    worker: &'a WorkerHandle,
    id: fathom_core::SourceId,
    ended: Receiver<()>,
    activity: Arc<Activity>,
    export: ExportView,
}

pub struct Setup {
    pub replies: Replies,
    pub limits: Limits,
    pub read_only: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            replies: Replies::Structured,
            limits: Limits::default(),
            read_only: false,
        }
    }
}

pub const CONTEXT: u32 = 7;

impl Setup {
    pub fn with(replies: Replies) -> Setup {
        Setup {
            replies,
            ..Setup::default()
        }
    }

    pub fn serve<'a>(self, disk: &Arc<dyn Disk>, worker: &'a WorkerHandle) -> (Served<'a>, Client) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let stream = Stream {
            socket: ours.into(),
            tls: None,
            read_ahead: Vec::new(),
        };
        let replies = self.replies;
        let served = self.attach(stream, disk, worker);
        (served, Client::new(theirs, replies))
    }

    pub fn attach<'a>(
        self,
        stream: Stream,
        disk: &Arc<dyn Disk>,
        worker: &'a WorkerHandle,
    ) -> Served<'a> {
        let mut export = ExportView::new("test", &disk.info());
        export.read_only |= self.read_only;
        let agreed = Agreed {
            replies: self.replies,
            allocation_context: (self.replies != Replies::Simple).then_some(CONTEXT),
            bitmap_context: None,
        };
        let (on_end, ended) = end();
        let source = NbdSource::new(stream, &export, agreed, self.limits, 3, on_end);
        let source = source.expect("a source");
        Served {
            worker,
            activity: source.activity(),
            id: worker.attach(Box::new(source)).expect("attached"),
            ended,
            export,
        }
    }
}

fn end() -> (OnEnd, Receiver<()>) {
    let (sender, ended) = channel();
    let on_end = Box::new(move || {
        // The test may have ended first.
        let _ = sender.send(());
    });
    (on_end, ended)
}

impl<'a> Served<'a> {
    /// Wait for the connection's end, then detach it.
    pub fn end(self) -> Ending {
        self.ended.recv_timeout(PATIENCE).expect("its end");
        self.detach()
    }

    pub fn has_ended(&self) -> bool {
        self.ended.try_recv().is_ok()
    }

    /// Continues with another source, as another process does.
    pub fn hand_over(self) -> Served<'a> {
        self.activity.hold(true);
        let source = self.worker.detach(self.id).into_any();
        let source = source.downcast::<NbdSource>().expect("what was attached");
        assert!(source.is_held());
        let mut files = Descriptors::default();
        let described = source.describe(&mut files).expect("described");
        let Described::State(state) = described else {
            panic!("cannot be handed over");
        };
        drop(source);
        let (on_end, ended) = end();
        let limits = Limits::default();
        let adopted = NbdSource::adopt(*state, &mut files, limits, 4, on_end);
        let mut adopted = adopted.expect("adopted");
        adopted.go_on(&self.export);
        Served {
            activity: adopted.activity(),
            id: self.worker.attach(Box::new(adopted)).expect("attached"),
            ended,
            ..self
        }
    }

    pub fn detach(self) -> Ending {
        let source = self.worker.detach(self.id).into_any();
        let source = source.downcast::<NbdSource>().expect("what was attached");
        source.ending().clone()
    }
}

/// Bytes that differ everywhere.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}
