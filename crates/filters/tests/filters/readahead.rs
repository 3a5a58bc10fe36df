use crate::support::{Ask, Bed, Peer};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

#[test]
fn a_sequential_reader_finds_it_there() {
    // The storage below is slow, so that reading ahead pays.
    let specs = ["readahead:size=64k", "delay:read=20ms"];
    let bed = Bed::new(&specs, 1);
    let truth = bed.bytes();
    let mut peer = bed.peer();
    let (mut quick, n) = (0, 128);
    for i in 0..n {
        let answer = peer.do_it(Ask::read(i * 4096, 4096));
        let at = i as usize * 4096;
        assert_eq!(answer.data, truth[at..at + 4096]);
        quick += u32::from(answer.took < Duration::from_millis(20));
    }
    // The other reads arrived while their data was still being read, or the machine was busy.
    assert!(quick > 0, "{quick} of {n}");
    assert!(bed.disk.carried_out.load(SeqCst) < 30);
}

#[test]
fn random_readers_are_left_alone() {
    let bed = Bed::new(&["readahead"], 1);
    let mut peer = bed.peer();
    for i in 0..64u64 {
        peer.do_it(Ask::read(i * 37 % 64 * 8192, 4096));
    }
    assert_eq!(bed.disk.carried_out.load(SeqCst), 64);
}

#[test]
fn what_was_written_meanwhile_is_seen_by_every_worker() {
    let bed = Bed::new(&["readahead:size=32k,after=1,memory=128k"], 2);
    let mut peers = [Peer::attach(&bed.workers[0]), Peer::attach(&bed.workers[1])];
    let mut truth = bed.bytes();
    let mut state = 1u64;
    let mut random = |n: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    let mut at = 0usize;
    for round in 0..3000u32 {
        let peer = &mut peers[random(2) as usize];
        if random(4) == 0 {
            let (sector, len) = (random(2000) as usize, random(48) as usize + 1);
            let range = sector * 512..(sector + len) * 512;
            truth[range.clone()].fill(round as u8);
            let write = Ask::write(range.start as u64, vec![round as u8; len * 512]);
            assert_eq!(peer.do_it(write).error, 0);
        }
        if random(50) == 0 {
            at = random(200) as usize * 512;
        }
        let len = 2048;
        at = if at + len > truth.len() { 0 } else { at };
        let answer = peer.do_it(Ask::read(at as u64, len));
        assert!(answer.data == truth[at..at + len], "round {round} at {at}");
        at += len;
    }
}

#[test]
fn what_is_on_its_way_is_waited_for() {
    let bed = Bed::new(&["readahead:size=64k,after=0"], 1);
    let truth = bed.bytes();
    let mut peer = bed.peer();
    peer.do_it(Ask::read(0, 4096));
    bed.disk.hold();
    peer.do_it(Ask::read(4096, 4096)); // is in memory, and triggers reading ahead
    peer.ask_all((16..24).map(|n| Ask::read(n * 4096, 4096)));
    peer.popped();
    bed.workers[0].look().unwrap(); // The worker has completed a turn since.
    // The disk has the reads ahead, and none of the seven requests that wait for them.
    assert!(bed.disk.held.load(SeqCst) < 7);
    bed.disk.release();
    for answer in peer.answers(8) {
        let at = (answer.number as usize - 2 + 16) * 4096;
        assert_eq!(answer.data, truth[at..at + 4096]);
    }
}

/// The error of a read ahead is not reported: neither to requests that wait for it nor to later
/// ones.
#[test]
fn what_could_not_be_read_ahead_is_read_again() {
    let bed = Bed::new(
        &[
            "readahead:size=64k,after=0",
            "delay:read=50ms",
            "fault:error=EIO,range=4k+64k,count=1",
        ],
        1,
    );
    let truth = bed.bytes();
    let mut peer = bed.peer();
    // The first read has the rest read ahead, and the second read waits for that.
    peer.ask_all([Ask::read(0, 4096), Ask::read(4096, 4096)]);
    for answer in peer.answers(2) {
        let at = answer.number as usize * 4096;
        assert_eq!((answer.error, &answer.data[..]), (0, &truth[at..at + 4096]));
    }
    for at in [4096, 8192] {
        let answer = peer.do_it(Ask::read(at as u64, 4096));
        assert_eq!((answer.error, &answer.data[..]), (0, &truth[at..at + 4096]));
    }
}

/// Data read ahead is not used while its range is being written.
#[test]
fn a_write_under_way_hides_what_was_read_before() {
    let bed = Bed::new(&["readahead:size=64k,after=0"], 1);
    let mut peer = bed.peer();
    let read = || Ask::read(8192, 4096);
    assert_eq!(peer.do_it(Ask::read(0, 4096)).error, 0);
    bed.disk.hold();
    assert_eq!(peer.do_it(read()).error, 0, "it is there");
    peer.ask(Ask::write(8192, vec![7; 4096]));
    peer.ask(read());
    peer.popped();
    bed.workers[0].look().unwrap(); // The worker has completed a turn since.
    assert!(peer.answer_now().is_none(), "it is for the disk to say");
    bed.disk.release();
    assert!(peer.answers(2).iter().all(|answer| answer.error == 0));
    assert_eq!(peer.do_it(read()).data, [7; 4096]);
}

#[test]
fn reading_ahead_goes_beyond_the_old_end_of_a_grown_disk() {
    let bed = Bed::new(&["readahead:size=64k,after=0"], 1);
    let mut peer = bed.peer();
    assert_eq!(peer.do_it(Ask::read(0, 4096)).error, 0);
    let old = bed.bytes().len();
    bed.disk.bytes.lock().resize(2 * old, 7);
    bed.filters[0].resized(old as u64, 2 * old as u64);
    assert_eq!(peer.do_it(Ask::read(old as u64, 4096)).data, [7; 4096]);
    bed.disk.hold();
    let next = peer.do_it(Ask::read(old as u64 + 4096, 4096));
    assert_eq!(next.data, [7; 4096], "it is in memory");
    bed.disk.release();
}
