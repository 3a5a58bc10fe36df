//! Disks that share threads.

use crate::support::{Peer, TestSource};
use crate::{options, pool, until};
use fathom_core::testing::{PollEngine, TestDisk};
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Polling, Pool, WorkerHandle, WorkerOptions,
};
use parking_lot::Mutex;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::ThreadId;

/// Adds a disk to the pool.
fn join(pool: &Pool) -> Vec<WorkerHandle> {
    let disk: Arc<dyn Disk> = TestDisk::new();
    pool.join(&disk, false).unwrap()
}

/// Blocks the worker in a notification of the returned peer, until the peer is no longer slow.
fn stick(worker: &WorkerHandle) -> Arc<Peer> {
    let stuck = Peer::new();
    stuck.be_slow(true);
    worker.attach(TestSource::boxed(&stuck, 1)).unwrap();
    stuck.offer(1);
    until("it is stuck", || stuck.published() > 0);
    stuck
}

#[test]
fn disks_take_turns() {
    let pool = pool(1, Polling::Off);
    let [deep, shallow, other] = [join(&pool), join(&pool), join(&pool)];
    let (many, one) = (Peer::new(), Peer::new());
    deep[0].attach(TestSource::boxed(&many, 1000)).unwrap();
    shallow[0].attach(TestSource::boxed(&one, 1000)).unwrap();
    let stuck = stick(&other[0]);
    many.offer(1000);
    one.offer(1);
    // The worker blocks when it has answered that request.
    one.be_slow(true);
    stuck.be_slow(false);
    until("the other disk has its turn", || one.published() > 0);
    let before = many.popped();
    one.be_slow(false);
    until("all are answered", || many.answered() == 1000);
    assert!(before <= 100, "{before} requests of one disk first");
}

/// Queues of one disk take turns, too.
#[test]
fn queues_take_turns() {
    let pool = pool(1, Polling::Off);
    let [disk, other] = [join(&pool), join(&pool)];
    let peers = [(); 4].map(|()| Peer::new());
    for peer in &peers {
        disk[0].attach(TestSource::boxed(peer, 1000)).unwrap();
    }
    let stuck = stick(&other[0]);
    peers.iter().for_each(|peer| peer.offer(1000));
    peers[3].be_slow(true);
    stuck.be_slow(false);
    until("the last queue has its turn", || peers[3].published() > 0);
    let before = peers[0].popped();
    peers[3].be_slow(false);
    until("all are answered", || {
        peers.iter().all(|peer| peer.answered() == 1000)
    });
    assert!(before <= 100, "{before} requests of one queue first");
}

#[test]
fn nobody_looks_at_disks_that_are_idle() {
    for polling in [Polling::Off, Polling::Auto] {
        let pool = pool(1, polling);
        let idle: Vec<_> = (0..50).map(|_| (join(&pool), Peer::new())).collect();
        for (workers, peer) in &idle {
            workers[0].attach(TestSource::boxed(peer, 8)).unwrap();
        }
        let busy = join(&pool);
        let peer = Peer::new();
        busy[0].attach(TestSource::boxed(&peer, 8)).unwrap();
        let serve = |n| {
            let before = peer.answered();
            peer.echo(n - 1);
            peer.offer(1);
            until("all are answered", || peer.answered() == before + n);
        };
        serve(100);
        let looks = || idle.iter().map(|(_, peer)| peer.looks()).sum::<u64>();
        let before = looks();
        serve(5_000);
        assert_eq!(looks(), before, "{polling:?}");
        // The idle disks still get their turn when they have requests.
        idle[7].1.offer(3);
        until("it is served", || idle[7].1.answered() == 3);
    }
}

#[test]
fn disks_come_and_go_beside_each_other() {
    let pool = pool(2, Polling::Auto);
    let staying = join(&pool);
    let peers = [Peer::new(), Peer::new()];
    let mut ids = Vec::new();
    for (worker, peer) in staying.iter().zip(&peers) {
        ids.push(worker.attach(TestSource::boxed(peer, 8)).unwrap());
        peer.echo(u64::MAX);
        peer.offer(4);
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    let workers = join(&pool);
                    for worker in &workers {
                        let peer = Peer::new();
                        let id = worker.attach(TestSource::boxed(&peer, 8)).unwrap();
                        peer.offer(5);
                        until("it is served", || peer.answered() == 5);
                        worker.detach(id);
                        assert_eq!(Arc::strong_count(&peer), 1);
                    }
                    // Commands to a worker that has ended have no effect, not even on a successor
                    // with its number.
                    workers[0].stop();
                    assert!(workers[0].look().is_err());
                }
            });
        }
        let before: Vec<_> = peers.iter().map(|peer| peer.answered()).collect();
        until("much is answered", || {
            let now = peers.iter().map(|peer| peer.answered());
            now.zip(&before).all(|(now, before)| now > before + 20_000)
        });
        over.store(true, SeqCst);
    });
    for (worker, (id, peer)) in staying.iter().zip(ids.into_iter().zip(&peers)) {
        peer.echo(0);
        worker.detach(id);
        assert_eq!(peer.answered(), peer.popped());
    }
}

/// Records the threads on which the disk has channels.
struct Told {
    disk: Arc<TestDisk>,
    threads: Mutex<Vec<ThreadId>>,
}

impl Disk for Told {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        self.threads.lock().push(std::thread::current().id());
        self.disk.channel(cx)
    }
}

#[test]
fn disks_and_their_queues_are_spread_over_the_threads() {
    let pool = pool(3, Polling::Off);
    let mut kept = Vec::new();
    let mut told = || {
        let disk = Arc::new(Told {
            disk: TestDisk::new(),
            threads: Mutex::default(),
        });
        let shared: Arc<dyn Disk> = disk.clone();
        let workers = pool.join(&shared, false).unwrap();
        let threads = disk.threads.lock().clone();
        assert_eq!(threads.len(), 3);
        kept.push(workers);
        threads
    };
    let each = [told(), told(), told()];
    let firsts = each.each_ref().map(|threads| threads[0]);
    for (first, threads) in firsts.iter().zip(&each) {
        // Each disk has a channel on every thread, in rotated order.
        let place = firsts.iter().position(|other| other == first).unwrap();
        assert_eq!(&firsts[place..], &threads[..3 - place]);
        assert_eq!(&firsts[..place], &threads[3 - place..]);
    }
    // The next disk takes the place of one that was removed.
    let mut again = || {
        kept.remove(1);
        let disk = Arc::new(Told {
            disk: TestDisk::new(),
            threads: Mutex::default(),
        });
        let shared: Arc<dyn Disk> = disk.clone();
        kept.insert(1, pool.join(&shared, false).unwrap());
        disk.threads.lock()[0]
    };
    assert_eq!([again(), again()], [firsts[1]; 2]);
}

#[test]
fn a_disk_without_a_channel_does_not_get_in() {
    struct Refuses(Arc<TestDisk>);

    impl Disk for Refuses {
        fn info(&self) -> DiskInfo {
            self.0.info()
        }

        fn activate(&self) -> Result<(), DiskError> {
            Ok(())
        }

        fn deactivate(&self) -> Result<(), DiskError> {
            Ok(())
        }

        fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
            drop(self.0.channel(cx)?);
            Err(DiskError::Unusable {
                path: "test.img".into(),
                problem: "it refuses".into(),
            })
        }
    }

    let pool = pool(2, Polling::Off);
    let inside = TestDisk::new();
    let disk: Arc<dyn Disk> = Arc::new(Refuses(inside.clone()));
    for _ in 0..10 {
        let error = pool.join(&disk, false).err().unwrap();
        assert!(error.to_string().contains("it refuses"), "{error}");
    }
    assert_eq!(Arc::strong_count(&disk), 1);
    // The eventfds of the refused disk are not watched any more.
    inside.release();
    let worker = join(&pool).remove(0);
    let sleeps = || worker.counters().sleeps.get();
    let before = sleeps();
    worker.look().unwrap();
    until("it sleeps", || sleeps() > before);
}

#[test]
fn a_pool_ends_with_its_last_worker() {
    let is_there = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let mut comms =
            tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        comms.any(|comm| comm == "ends soon\n")
    };
    let options = WorkerOptions {
        name: "ends soon".into(),
        ..options(Polling::Off)
    };
    let pool = Pool::start([options], PollEngine::boxed).unwrap();
    let workers = join(&pool);
    drop(pool);
    let peer = Peer::new();
    workers[0].attach(TestSource::boxed(&peer, 1)).unwrap();
    peer.offer(1);
    until("it is served", || peer.answered() == 1);
    assert!(is_there());
    // The source is not detached; nothing of it is in flight.
    drop(workers);
    until("the thread is gone", || !is_there());
    assert_eq!(Arc::strong_count(&peer), 1);
}
