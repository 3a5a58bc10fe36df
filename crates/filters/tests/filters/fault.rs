use crate::support::{Ask, Bed, PATIENCE};
use fathom_core::Op;
use std::time::Duration;

#[test]
fn errors_are_of_the_operation_and_the_range_that_were_chosen() {
    let bed = Bed::new(&["fault:error=ENOSPC,op=write+zero,range=64k+4k"], 1);
    let mut peer = bed.peer();
    let mut error = |ask| peer.do_it(ask).error;
    let write = |at, len| Ask::write(at, vec![1; len]);
    assert_eq!(error(write(65536, 512)), libc::ENOSPC);
    assert_eq!(error(write(65536 - 512, 1024)), libc::ENOSPC);
    assert_eq!(error(write(65536 + 4096 - 512, 4096)), libc::ENOSPC);
    let zero = Ask {
        op: Op::WriteZeroes,
        ..write(65536, 512)
    };
    assert_eq!(error(zero), libc::ENOSPC);
    assert_eq!(error(write(65536 - 512, 512)), 0);
    assert_eq!(error(write(65536 + 4096, 512)), 0);
    assert_eq!(error(Ask::read(65536, 512)), 0);
    assert_eq!(error(Ask::flush()), 0);
}

#[test]
fn errors_come_so_often_so_many_times_and_after_so_much() {
    let bed = Bed::new(&["fault:error=EIO,count=3"], 1);
    let mut peer = bed.peer();
    let mut errors = |n| -> Vec<i32> {
        let read = |_| peer.do_it(Ask::read(0, 4096)).error;
        (0..n).map(read).collect()
    };
    assert_eq!(errors(5), [5, 5, 5, 0, 0]);
    bed.set(0, &[("count", ""), ("after", "12k")]).unwrap();
    assert_eq!(errors(5), [0, 0, 0, 5, 5]);
    let chance = [("after", ""), ("probability", "30%"), ("seed", "7")];
    bed.set(0, &chance).unwrap();
    let drawn = errors(1000);
    let failed = drawn.iter().filter(|e| **e == 5).count();
    assert!((240..360).contains(&failed), "{failed}");
    bed.set(0, &chance).unwrap();
    assert_eq!(errors(1000), drawn);
    bed.set(0, &[("seed", "8")]).unwrap();
    assert_ne!(errors(1000), drawn);
    assert!(bed.set(0, &[("error", "EWHATEVER")]).is_err());
}

#[test]
fn corrupted_reads_are_always_corrupted_alike() {
    let bed = Bed::new(&["fault:corrupt=yes,probability=0.5,range=128k+64k"], 1);
    let mut peer = bed.peer();
    let truth = bed.bytes();
    let whole = peer.do_it(Ask::read(0, 512 << 10)).data;
    let differs = |sector: usize| {
        let range = sector * 512..(sector + 1) * 512;
        let pairs = whole[range.clone()].iter().zip(&truth[range]);
        pairs.map(|(a, b)| (a ^ b).count_ones()).sum::<u32>()
    };
    let corrupt: Vec<_> = (0..1024).filter(|sector| differs(*sector) > 0).collect();
    assert!(
        corrupt
            .iter()
            .all(|s| (256..384).contains(s) && differs(*s) == 1)
    );
    assert!((40..90).contains(&corrupt.len()), "{}", corrupt.len());
    // Other requests return the same corrupted data.
    for sector in 250..390 {
        let data = peer.do_it(Ask::read(sector * 512, 512)).data;
        let at = sector as usize * 512;
        assert_eq!(data, whole[at..at + 512], "sector {sector}");
    }
    assert_eq!(bed.bytes(), truth);
}

#[test]
fn reads_are_corrupted_so_many_times_and_after_so_much() {
    let bed = Bed::new(&["fault:corrupt=yes,count=3"], 1);
    let mut peer = bed.peer();
    let truth = bed.bytes();
    let mut corrupted = |at: usize, len: usize| {
        let data = peer.do_it(Ask::read(at as u64, len)).data;
        let sectors = data.chunks(512).zip(truth[at..at + len].chunks(512));
        sectors.filter(|(read, right)| read != right).count()
    };
    assert_eq!(corrupted(0, 1024), 2);
    assert_eq!(corrupted(0, 4096), 1);
    assert_eq!(corrupted(0, 4096), 0);
    bed.set(0, &[("count", ""), ("after", "8k")]).unwrap();
    assert_eq!([0; 3].map(|_| corrupted(0, 4096)), [0, 0, 8]);
}

#[test]
fn what_hangs_goes_on_when_it_is_released() {
    let bed = Bed::new(&["fault:hang=yes,op=write"], 1);
    let mut peer = bed.peer();
    peer.ask(Ask::write(4096, vec![9; 512]));
    assert_eq!(peer.do_it(Ask::read(0, 512)).error, 0);
    std::thread::sleep(Duration::from_millis(50));
    assert!(peer.answer_now().is_none());
    bed.set(0, &[("seed", "3")]).unwrap();
    assert!(peer.answer_now().is_none());
    bed.set(0, &[("hang", "no")]).unwrap();
    let answer = peer.answer();
    assert!(answer.error == 0 && answer.took < PATIENCE);
    assert_eq!(bed.bytes()[4096..4608], [9; 512]);
}
