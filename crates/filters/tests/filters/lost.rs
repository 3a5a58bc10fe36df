//! Compares a volatile cache with a model of one.

use crate::support::{Ask, Bed};
use fathom_core::Op;
use proptest::prelude::*;
use std::collections::BTreeSet;

const SECTORS: usize = 256;
const LEN: usize = SECTORS * 512;

/// The possible contents of the disk and the contents that readers see, by sector. Each sector has
/// the number of the write that wrote it.
struct Model {
    seen: Vec<u8>,
    /// Possible contents of each sector after a power cut.
    possible: Vec<BTreeSet<u8>>,
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: usize, len: usize, fua: bool },
    Zero { at: usize, len: usize },
    Read { at: usize, len: usize },
    Flush,
    Cut,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..SECTORS - 1).prop_flat_map(|at| (Just(at), 1..=(SECTORS - at).min(24)));
    prop_oneof![
        6 => (range.clone(), prop::bool::weighted(0.1))
            .prop_map(|((at, len), fua)| Step::Write { at, len, fua }),
        1 => range.clone().prop_map(|(at, len)| Step::Zero { at, len }),
        4 => range.prop_map(|(at, len)| Step::Read { at, len }),
        1 => Just(Step::Flush),
        1 => Just(Step::Cut),
    ]
}

impl Model {
    fn store(&mut self, at: usize, len: usize, value: u8, torn: bool) {
        for sector in at..at + len {
            self.seen[sector] = value;
            if torn {
                self.possible[sector].insert(value);
            }
        }
    }

    fn flush(&mut self) {
        for (seen, possible) in self.seen.iter().zip(&mut self.possible) {
            *possible = BTreeSet::from([*seen]);
        }
    }
}

fn run(writes: &str, steps: &[Step]) {
    let spec = format!("fault:writes={writes},seed=5");
    let bed = Bed::new(&[&spec], 1);
    bed.disk.bytes.lock()[..LEN].fill(0);
    let mut peer = bed.peer();
    let mut model = Model {
        seen: vec![0; SECTORS],
        possible: vec![BTreeSet::from([0]); SECTORS],
    };
    for (n, step) in steps.iter().enumerate() {
        let value = (n % 250 + 1) as u8;
        match *step {
            Step::Write { at, len, fua } => {
                let mut ask = Ask::write(at as u64 * 512, vec![value; len * 512]);
                ask.fua = fua;
                assert_eq!(peer.do_it(ask).error, 0);
                model.store(at, len, value, writes == "torn");
                if fua {
                    // The cache may flush more than it must.
                    model.flush();
                }
            }
            Step::Zero { at, len } => {
                let mut ask = Ask::write(at as u64 * 512, vec![0; len * 512]);
                ask.op = Op::WriteZeroes;
                assert_eq!(peer.do_it(ask).error, 0);
                model.store(at, len, 0, false);
            }
            Step::Read { at, len } => {
                let answer = peer.do_it(Ask::read(at as u64 * 512, len * 512));
                check(&answer.data, &model.seen[at..at + len], n);
            }
            Step::Flush => {
                assert_eq!(peer.do_it(Ask::flush()).error, 0);
                model.flush();
            }
            Step::Cut => {
                bed.set(0, &[("power-cut", "yes")]).unwrap();
                let answer = peer.do_it(Ask::read(0, LEN));
                for (sector, bytes) in answer.data.chunks_exact(512).enumerate() {
                    let value = bytes[0];
                    assert!(bytes.iter().all(|byte| *byte == value));
                    let possible = &model.possible[sector];
                    assert!(
                        possible.contains(&value),
                        "step {n}: sector {sector} is {value}"
                    );
                    model.seen[sector] = value;
                }
                model.flush();
            }
        }
    }
    bed.set(0, &[("writes", "safe")]).unwrap();
    let answer = peer.do_it(Ask::read(0, LEN));
    check(&answer.data, &model.seen, steps.len());
    assert_eq!(peer.do_it(Ask::flush()).error, 0);
    check(&bed.bytes()[..LEN], &model.seen, steps.len());
}

fn check(data: &[u8], wanted: &[u8], step: usize) {
    for (sector, (bytes, value)) in data.chunks_exact(512).zip(wanted).enumerate() {
        let same = bytes.iter().all(|byte| byte == value);
        assert!(
            same,
            "step {step}: sector {sector} is {}, not {value}",
            bytes[0]
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn lost_writes_are_those_that_were_not_flushed(steps in prop::collection::vec(step(), 1..120)) {
        run("lost", &steps);
    }

    #[test]
    fn torn_writes_are_old_or_new_by_sector(steps in prop::collection::vec(step(), 1..120)) {
        run("torn", &steps);
    }
}

#[test]
fn a_write_that_is_not_flushed_is_lost_and_a_torn_one_half() {
    for (writes, survive) in [("lost", 0..1), ("torn", 40..216)] {
        let bed = Bed::new(&[&format!("fault:writes={writes}")], 1);
        bed.disk.bytes.lock()[..LEN].fill(0);
        let mut peer = bed.peer();
        peer.do_it(Ask::write(0, vec![0xff; LEN]));
        assert_eq!(peer.do_it(Ask::read(0, LEN)).data, vec![0xff; LEN]);
        bed.set(0, &[("power-cut", "yes")]).unwrap();
        let data = peer.do_it(Ask::read(0, LEN)).data;
        let blocks = data.chunks(4096);
        // A physical block is written as a whole.
        assert!(blocks.clone().all(|b| (b[0] == 0xff) == (b[4095] == 0xff)));
        let left = data.chunks(512).filter(|sector| sector[0] == 0xff).count();
        assert!(survive.contains(&left), "{writes}: {left}");
    }
}

#[test]
fn workers_that_flush_at_once_do_not_undo_each_other() {
    let bed = Bed::new(&["fault:writes=lost,cache-size=1M"], 2);
    std::thread::scope(|scope| {
        for (n, worker) in bed.workers.iter().enumerate() {
            let mut peer = crate::support::Peer::attach(worker);
            scope.spawn(move || {
                let base = (n * LEN) as u64;
                for round in 1..100u8 {
                    let at = base + u64::from(round) % 8 * 8192;
                    peer.ask(Ask::write(at, vec![round; 8192]));
                    if round % 3 == 0 {
                        peer.ask(Ask::flush());
                        assert_eq!(peer.answer().error, 0);
                    }
                    assert_eq!(peer.answer().error, 0);
                    assert_eq!(peer.do_it(Ask::read(at, 8192)).data, vec![round; 8192]);
                }
                assert_eq!(peer.do_it(Ask::flush()).error, 0);
            });
        }
    });
    let bytes = bed.bytes();
    for base in [0, LEN] {
        for slot in 0..8usize {
            let last = (1..100).rev().find(|round| round % 8 == slot).unwrap();
            assert_eq!(bytes[base + slot * 8192], last as u8);
        }
    }
}

/// A flush covers the writes before it. Readers see data that is written during the flush, but a
/// power cut discards it.
#[test]
fn what_is_written_during_a_flush_is_not_flushed() {
    for writes in ["lost", "torn"] {
        let fault = format!("fault:writes={writes}");
        let bed = Bed::new(&[&fault], 1);
        let mut peer = bed.peer();
        let write = |value| Ask::write(8192, vec![value; 4096]);
        assert_eq!(peer.do_it(write(1)).error, 0);
        bed.disk.hold();
        peer.ask(Ask::flush());
        peer.popped();
        let second = peer.ask(write(2));
        peer.popped();
        if writes == "lost" {
            // The second write does not wait for the flush.
            let answer = peer.answer();
            assert_eq!((answer.number, answer.error), (second, 0));
            bed.disk.release();
        } else {
            bed.disk.release();
            assert_eq!(peer.answer().error, 0);
        }
        assert_eq!(peer.answer().error, 0);
        assert_eq!(peer.do_it(Ask::read(8192, 4096)).data, [2; 4096]);
        bed.set(0, &[("power-cut", "yes")]).unwrap();
        let left = peer.do_it(Ask::read(8192, 4096)).data;
        match writes {
            "lost" => assert_eq!(left, [1; 4096]),
            _ => assert!(left.iter().all(|byte| [1, 2].contains(byte))),
        }
    }
}

/// After a failed flush no data counts as flushed, and the next flush tries again.
#[test]
fn what_could_not_be_written_is_kept() {
    let bed = Bed::new(
        &["fault:writes=lost", "fault:error=EIO,op=write,count=1"],
        1,
    );
    let mut peer = bed.peer();
    peer.do_it(Ask::write(0, vec![3; 512]));
    assert_eq!(peer.do_it(Ask::flush()).error, libc::EIO);
    assert_ne!(bed.bytes()[0], 3);
    assert_eq!(peer.do_it(Ask::read(0, 512)).data, [3; 512]);
    assert_eq!(peer.do_it(Ask::flush()).error, 0);
    assert_eq!(bed.bytes()[0], 3);
}

#[test]
fn a_full_cache_is_written() {
    let bed = Bed::new(&["fault:writes=lost,cache-size=1M"], 1);
    bed.disk.bytes.lock().resize(4 << 20, 0);
    let mut peer = bed.peer();
    for n in 0..48u64 {
        assert_eq!(peer.do_it(Ask::write(n << 16, vec![7; 1 << 16])).error, 0);
    }
    bed.set(0, &[("power-cut", "yes")]).unwrap();
    let kept = bed.bytes().iter().filter(|byte| **byte == 7).count();
    assert!((2 << 20..4 << 20).contains(&kept), "{kept}");
}
