use crate::support::{Answer, Ask, Bed, Peer};
use fathom_core::Clock;
use fathom_core::testing::TestDisk;
use fathom_filters::Filters;
use std::time::{Duration, Instant};

/// Keeps `depth` requests in flight and returns how many a second are
/// answered.
fn rate(peer: &mut Peer, depth: usize, time: Duration, ask: impl Fn() -> Ask) -> f64 {
    let (count, seconds) = run(peer, depth, time, ask);
    count / seconds
}

fn run(peer: &mut Peer, depth: usize, time: Duration, ask: impl Fn() -> Ask) -> (f64, f64) {
    peer.ask_all((0..depth).map(|_| ask()));
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < time {
        assert_eq!(peer.answer().error, 0);
        peer.ask(ask());
        count += 1;
    }
    (f64::from(count), start.elapsed().as_secs_f64())
}

fn read() -> Ask {
    Ask::read(0, 4096)
}

fn write() -> Ask {
    Ask::write(0, vec![1; 4096])
}

const TIME: Duration = Duration::from_millis(500);

/// A busy machine may take the worker's time away, but never adds to it. (How
/// exact it is shows tools/bench/filters.py.)
fn assert_near(got: f64, wanted: f64, what: &str) {
    let ratio = got / wanted;
    assert!((0.5..1.25).contains(&ratio), "{what}: {got} of {wanted}");
}

#[test]
fn so_many_operations_a_second() {
    let bed = Bed::new(&["throttle:iops-read=2000,iops-write=500"], 1);
    let mut peer = bed.peer();
    assert_near(rate(&mut peer, 32, TIME, read), 2000.0, "reads");
    assert_near(rate(&mut bed.peer(), 8, TIME, write), 500.0, "writes");
    bed.set(0, &[("iops-read", "4000")]).unwrap();
    peer.answers(32);
    assert_near(rate(&mut peer, 32, TIME, read), 4000.0, "reads, changed");
    bed.set(0, &[("iops-read", "")]).unwrap();
    assert!(rate(&mut peer, 32, TIME, read) > 5000.0);
}

#[test]
fn so_many_bytes_a_second_and_long_operations_count_as_several() {
    let bed = Bed::new(&["throttle:bps-total=4M"], 1);
    assert_near(rate(&mut bed.peer(), 8, TIME, read), 1024.0, "bytes");
    let bed = Bed::new(&["throttle:iops-total=1000,iops-size=2k"], 1);
    assert_near(rate(&mut bed.peer(), 8, TIME, read), 500.0, "sizes");
}

#[test]
fn a_burst_is_let_through_and_then_no_more() {
    let spec = "throttle:iops-total=100,iops-total-max=1000,iops-total-max-length=1";
    let bed = Bed::new(&[spec], 1);
    let mut peer = bed.peer();
    peer.ask_all((0..1100).map(|_| read()));
    let answers = peer.answers(1100);
    let first = answers[0].at;
    let after = |answer: &Answer| Clock::get().duration(answer.at - first).as_secs_f64();
    assert!(after(&answers[999]) < 0.5, "{}", after(&answers[999]));
    let rest = after(&answers[1099]) - after(&answers[999]);
    assert!((0.7..1.4).contains(&rest), "{rest}");
}

#[test]
fn a_long_burst_has_a_rate_of_its_own() {
    let spec = "throttle:iops-total=10,iops-total-max=1000,iops-total-max-length=60";
    let bed = Bed::new(&[spec], 1);
    assert_near(rate(&mut bed.peer(), 32, TIME, read), 1000.0, "burst");
}

#[test]
fn queues_take_turns_however_much_waits_in_each() {
    let bed = Bed::new(&["throttle:iops-total=1000"], 2);
    let mut peers = [
        Peer::attach(&bed.workers[0]),
        Peer::attach(&bed.workers[0]),
        Peer::attach(&bed.workers[1]),
    ];
    let depths = [256, 2, 4];
    let counts: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = peers
            .iter_mut()
            .zip(depths)
            .map(|(peer, depth)| scope.spawn(move || run(peer, depth, 2 * TIME, read).0))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let sum: f64 = counts.iter().sum();
    assert_near(sum, 1000.0, "all of them");
    assert!(counts.iter().all(|n| *n > sum / 6.0), "{counts:?}");
}

#[test]
fn disks_of_a_group_share_its_limits() {
    let filters = Filters::default();
    let bed = |spec| Bed::of(TestDisk::new(), &filters, &[spec], 1);
    let one = bed("throttle:group=g,iops-total=100");
    let other = bed("throttle:group=g,iops-total=1000");
    let alone = bed("throttle:iops-total=2000");
    // The last one wins, and everybody is told so.
    assert_eq!(one.filters[0].values(), other.filters[0].values());
    one.workers[0].look();
    let mut peers = [one.peer(), other.peer(), alone.peer()];
    let counts: Vec<f64> = std::thread::scope(|scope| {
        let run = |peer| scope.spawn(move || rate(peer, 16, 2 * TIME, read));
        let threads: Vec<_> = peers.iter_mut().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_near(counts[0] + counts[1], 1000.0, "both");
    assert!(counts[0] > 250.0 && counts[1] > 250.0, "{counts:?}");
    assert_near(counts[2], 2000.0, "the one without a group");
}

#[test]
fn waiting_is_the_stage_queue() {
    let bed = Bed::new(&["throttle:iops-total=100"], 1);
    let mut peer = bed.peer();
    peer.ask_all((0..20).map(|_| read()));
    let last = peer.answers(20).pop().unwrap();
    assert!(last.queued > Duration::from_millis(100), "{last:?}");
    assert!(last.queued.as_secs_f64() > 0.9 * last.took.as_secs_f64());
}
