use crate::support::{Answer, Ask, Bed, Peer};
use fathom_core::testing::TestDisk;
use fathom_core::{Clock, Op};
use fathom_filters::Filters;
use std::time::{Duration, Instant};

/// Keeps `depth` requests in flight for `time`, and returns how many were answered in that time.
/// Afterwards, `depth` requests are still in flight.
fn count(peer: &mut Peer, depth: usize, time: Duration, ask: impl Fn() -> Ask) -> f64 {
    let start = Instant::now();
    peer.ask_all((0..depth).map(|_| ask()));
    let mut count = 0;
    while start.elapsed() < time {
        assert_eq!(peer.answer().error, 0);
        peer.ask(ask());
        count += 1;
    }
    f64::from(count)
}

/// Returns the number of requests answered per second.
fn rate(peer: &mut Peer, depth: usize, ask: impl Fn() -> Ask) -> f64 {
    let count = count(peer, depth, TIME, ask);
    peer.answers(depth);
    count / TIME.as_secs_f64()
}

/// Returns the rate of each peer while all of them submit as much as they can. A thread that starts
/// late must not leave its share to the others.
fn rates(peers: &mut [(Peer, usize)]) -> Vec<f64> {
    let start = Instant::now();
    let counts: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = peers
            .iter_mut()
            .map(|(peer, depth)| scope.spawn(|| count(peer, *depth, 2 * TIME, read)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let seconds = start.elapsed().as_secs_f64();
    for (peer, depth) in peers {
        peer.answers(*depth);
    }
    counts.iter().map(|count| count / seconds).collect()
}

fn read() -> Ask {
    Ask::read(0, 4096)
}

fn write() -> Ask {
    Ask::write(0, vec![1; 4096])
}

const TIME: Duration = Duration::from_millis(500);

/// Number of attempts for results that a busy machine may spoil.
const TRIES: u32 = 20;

/// Checks that a measured rate is near `wanted`. A rate is measured in wall-clock time, since there
/// is no other reference.
///
/// A rate never exceeds its limit on any machine: a busy machine only takes time from the worker. A
/// rate that is too low is therefore measured again, and the limits are so low that any machine
/// reaches them. tools/bench/filters.py measures how exact a rate is.
fn assert_near(wanted: f64, what: &str, mut measure: impl FnMut() -> f64) {
    let mut got = 0.0;
    for _ in 0..TRIES {
        got = measure();
        assert_not_above(got, wanted, what);
        if got > 0.5 * wanted {
            return;
        }
    }
    panic!("{what}: {got} of {wanted}");
}

fn assert_not_above(got: f64, wanted: f64, what: &str) {
    assert!(got < 1.25 * wanted, "{what}: {got} of {wanted}");
}

#[test]
fn so_many_operations_a_second() {
    let bed = Bed::new(&["throttle:iops-read=400,iops-write=100"], 1);
    let mut peer = bed.peer();
    assert_near(400.0, "reads", || rate(&mut peer, 8, read));
    assert_near(100.0, "writes", || rate(&mut bed.peer(), 2, write));
    bed.set(0, &[("iops-read", "800")]).unwrap();
    assert_near(800.0, "reads, changed", || rate(&mut peer, 8, read));
    bed.set(0, &[("iops-read", "")]).unwrap();
    // More than any of the previous limits allows.
    assert!((0..TRIES).any(|_| rate(&mut peer, 8, read) > 2.0 * 800.0));
}

/// None of these requests may complete early on any machine.
#[test]
fn discards_and_zeroes_are_writes_and_flushes_are_free() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let bed = Bed::new(&["throttle:iops-write=10"], 1);
        let mut peer = bed.peer();
        peer.ask_all((0..4).map(|_| Ask { op, ..write() }));
        let last = peer.answers(4).pop().unwrap();
        assert!(last.queued > Duration::from_millis(150), "{op:?} {last:?}");
    }
    let bed = Bed::new(&["throttle:bps-total=1"], 1);
    let mut peer = bed.peer();
    // The second write would have to wait for an hour, and so would the requests behind it.
    peer.ask_all([write(), write(), write(), Ask::flush()]);
    while peer.answer().number != 3 {}
    drop(bed.workers[0].detach(peer.id.take().unwrap()));
}

#[test]
fn limits_that_are_lifted_hold_nobody_back() {
    let bed = Bed::new(&["throttle:bps-total=1"], 1);
    let mut peer = bed.peer();
    // All of these except the first would wait for an hour each.
    peer.ask_all((0..10).map(|_| read()));
    peer.popped();
    bed.workers[0].look().unwrap(); // The worker has completed a turn since.
    bed.set(0, &[("bps-total", "")]).unwrap();
    assert_eq!(peer.answers(10).len(), 10);
}

#[test]
fn so_many_bytes_a_second_and_long_operations_count_as_several() {
    let bed = Bed::new(&["throttle:bps-total=4M"], 1);
    assert_near(1024.0, "bytes", || rate(&mut bed.peer(), 8, read));
    let bed = Bed::new(&["throttle:iops-total=1000,iops-size=2k"], 1);
    assert_near(500.0, "sizes", || rate(&mut bed.peer(), 8, read));
}

#[test]
fn a_burst_is_let_through_and_then_no_more() {
    let spec = "throttle:iops-total=100,iops-total-max=1000,iops-total-max-length=1";
    let bed = Bed::new(&[spec], 1);
    let mut peer = bed.peer();
    let start = Clock::get().now();
    peer.ask_all((0..1100).map(|_| read()));
    let answers = peer.answers(1100);
    let after = |answer: &Answer| Clock::get().duration(answer.at - start).as_secs_f64();
    // Without a burst, the first thousand requests would take ten times the time of the next
    // hundred; with a burst, less. The last hundred do not complete early on any machine.
    let burst = after(&answers[999]);
    let rest = after(&answers[1099]) - burst;
    assert!(burst < 5.0 * rest, "{burst} s, then {rest} s");
    assert!(after(&answers[1099]) > 0.7, "{burst} s, then {rest} s");
}

#[test]
fn a_long_burst_has_a_rate_of_its_own() {
    let spec = "throttle:iops-total=10,iops-total-max=1000,iops-total-max-length=60";
    let bed = Bed::new(&[spec], 1);
    assert_near(1000.0, "burst", || rate(&mut bed.peer(), 32, read));
}

#[test]
fn queues_take_turns_however_much_waits_in_each() {
    let bed = Bed::new(&["throttle:iops-total=1000"], 2);
    let mut peers = [
        (Peer::attach(&bed.workers[0]), 256),
        (Peer::attach(&bed.workers[0]), 2),
        (Peer::attach(&bed.workers[1]), 4),
    ];
    let is_fair = |rates: Vec<f64>| {
        let sum: f64 = rates.iter().sum();
        assert_not_above(sum, 1000.0, "all of them");
        sum > 500.0 && rates.iter().all(|n| *n > sum / 6.0)
    };
    assert!((0..TRIES).any(|_| is_fair(rates(&mut peers))));
}

#[test]
fn disks_of_a_group_share_its_limits() {
    let filters = Filters::default();
    let bed = |spec| Bed::of(TestDisk::new(), &filters, &[spec], 1);
    let one = bed("throttle:group=g,iops-total=100");
    let other = bed("throttle:group=g,iops-total=1000");
    let alone = bed("throttle:iops-total=2000");
    // A member that sets no limits changes nothing.
    let joins = bed("throttle:group=g");
    // The last setting wins, and all members report it.
    assert_eq!(one.filters[0].values(), other.filters[0].values());
    assert_eq!(one.filters[0].values(), joins.filters[0].values());
    assert!(!one.filters[0].values().is_empty());
    one.workers[0].look().unwrap();
    let mut peers = [(one.peer(), 16), (other.peer(), 16), (alone.peer(), 16)];
    let is_shared = |rates: Vec<f64>| {
        assert_not_above(rates[0] + rates[1], 1000.0, "both");
        assert_not_above(rates[2], 2000.0, "the one without a group");
        rates[0] > 250.0 && rates[1] > 250.0 && rates[2] > 1000.0
    };
    assert!((0..TRIES).any(|_| is_shared(rates(&mut peers))));
}

#[test]
fn waiting_is_the_stage_queue() {
    let bed = Bed::new(&["throttle:iops-total=100"], 1);
    let mut peer = bed.peer();
    peer.ask_all((0..20).map(|_| read()));
    let answers = peer.answers(20);
    let last = answers.last().unwrap();
    assert!(last.queued > Duration::from_millis(100), "{last:?}");
    // The other requests are quick, except those that a busy machine delays.
    let mut waited = answers
        .iter()
        .filter(|a| a.took > Duration::from_millis(50));
    assert!(waited.any(|a| a.queued.as_secs_f64() > 0.9 * a.took.as_secs_f64()));
}
