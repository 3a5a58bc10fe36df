//! Notifications: which side is notified, of what and when; and what the dirty log records of it.

use super::fixture::*;
use crate::BlkQueue;
use crate::features::RING_F_EVENT_IDX;
use crate::request::T_IN;
use crate::testing::{Driver, TestMemory, context, device, disk, finish, pop, signalled};
use fathom_core::Source;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

#[test]
fn without_event_idx_the_flags_rule() {
    let mut f = Fixture::new(disk(), FEATURES & !RING_F_EVENT_IDX);
    assert!(serve(&mut f, 1));
    assert!(!f.queue.publish(&mut f.cx), "nothing new");
    f.driver.set_interrupts(false);
    assert!(!serve(&mut f, 3));
    f.driver.set_interrupts(true);
    assert!(serve(&mut f, 2));

    assert!(!f.queue.arm());
    assert!(f.driver.kicks_wanted());
    f.queue.disarm();
    assert!(!f.driver.kicks_wanted());
    f.driver.offer(0);
    f.driver.publish();
    assert!(f.queue.arm(), "came in before");
}

#[test]
fn with_event_idx_an_interrupt_is_sent_when_its_index_is_passed() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.driver.set_interrupts(false);
    // (requests, used_event, interrupt); the used index counts from 0.
    let steps = [
        (1, 0, true),
        (1, 0, false),
        (3, 3, true),
        (3, 8, false),
        (1, 8, true),
        (4, 8, false),
        (2, 14, true),
    ];
    for (n, event, expected) in steps {
        f.driver.set_used_event(event);
        assert_eq!(serve(&mut f, n), expected, "{n} more, event {event}");
    }
    assert!(!f.queue.publish(&mut f.cx), "nothing new");
}

#[test]
fn with_event_idx_a_kick_is_asked_for_by_index() {
    let mut f = Fixture::new(disk(), FEATURES);
    serve(&mut f, 5);
    assert!(!f.queue.arm());
    assert_eq!(f.driver.avail_event(), 5);
    f.driver.offer(0);
    assert!(f.driver.publish(), "armed");
    assert!(f.queue.arm(), "came in before");
    f.queue.disarm();
    for _ in 0..100 {
        f.driver.offer(0);
        assert!(!f.driver.publish(), "disarmed");
        let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
        finish(&mut f.queue, &mut f.cx, &popped, 0);
    }
}

#[test]
fn notify_signals_the_call_eventfd() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.queue.notify();
    f.queue.notify();
    let (setup, _) = f.queue.into_parts();
    assert_eq!(signalled(setup.call.as_ref().unwrap()), Some(2));
    assert_eq!(signalled(&setup.kick), None);
}

/// Driver and device sleep whenever they have nothing to do, and only notifications wake them. A
/// lost notification ends the test.
#[test]
fn no_notification_is_lost_between_two_threads() {
    for features in [FEATURES, FEATURES & !RING_F_EVENT_IDX] {
        sleep_and_wake(features);
    }
}

/// The two steps of one side of a race in each round: prepare, then act. `Act` returns whether it
/// has noticed the other side.
enum Turn {
    Prepare,
    Act,
}

const ROUNDS: u32 = 40_000;

/// Lets two threads act at the same moment, many times. In each round, at least one of them must
/// notice the other. Returns how often neither did.
fn race(
    mut guest: impl FnMut(Turn) -> bool + Send + 'static,
    mut device: impl FnMut(Turn) -> bool,
) -> u32 {
    let (rounds, noticed) = (
        Arc::new(AtomicU32::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let thread = {
        let (rounds, noticed) = (rounds.clone(), noticed.clone());
        std::thread::spawn(move || {
            for round in 0..ROUNDS {
                guest(Turn::Prepare);
                meet(&rounds, 2 * round + 1);
                dawdle(round, 0);
                noticed.store(guest(Turn::Act), Ordering::SeqCst);
                meet(&rounds, 2 * round + 2);
            }
        })
    };
    let mut missed = 0;
    for round in 0..ROUNDS {
        device(Turn::Prepare);
        meet(&rounds, 2 * round + 1);
        dawdle(round, 1);
        let noticed_here = device(Turn::Act);
        meet(&rounds, 2 * round + 2);
        missed += u32::from(!noticed_here && !noticed.load(Ordering::SeqCst));
    }
    thread.join().expect("the guest");
    missed
}

/// Delays one side by some nanoseconds in half of all rounds. Otherwise the order and the distance
/// of the two sides would be the same each time, and only some distances reveal a missed
/// notification.
fn dawdle(round: u32, side: u32) {
    if round % 4 == 2 + side {
        (0..round / 4 % 100).for_each(|step| {
            std::hint::black_box(step);
        });
    }
}

/// Waits for the other of two threads.
fn meet(arrivals: &AtomicU32, meeting: u32) {
    arrivals.fetch_add(1, Ordering::SeqCst);
    let mut spins = 0u32;
    while arrivals.load(Ordering::SeqCst) < 2 * meeting {
        spins += 1;
        if spins.is_multiple_of(1000) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// The driver makes work available while the device requests kicks. Either the driver sees that it
/// must kick, or the device sees the work.
#[test]
fn arming_and_making_available_do_not_miss_each_other() {
    for features in [FEATURES, FEATURES & !RING_F_EVENT_IDX] {
        let mut f = Fixture::new(disk(), features);
        serve(&mut f, 1);
        let Fixture {
            mut driver,
            mut queue,
            mut cx,
            ..
        } = f;
        let guest = move |turn| match turn {
            Turn::Prepare => {
                driver.offer(0);
                false
            }
            Turn::Act => driver.publish(),
        };
        let device = |turn| match turn {
            Turn::Prepare => {
                let (popped, _) = pop(&mut queue, &mut cx).unwrap();
                finish(&mut queue, &mut cx, &popped, 0);
                queue.publish(&mut cx);
                queue.disarm();
                false
            }
            Turn::Act => queue.arm(),
        };
        assert_eq!(race(guest, device), 0, "kicks were lost");
    }
}

/// The device publishes a reply while the driver requests an interrupt. Either the device sees that
/// it must interrupt, or the driver sees the reply.
#[test]
fn publishing_and_asking_for_interrupts_do_not_miss_each_other() {
    for features in [FEATURES, FEATURES & !RING_F_EVENT_IDX] {
        let mut f = Fixture::new(disk(), features);
        serve(&mut f, 1);
        let Fixture {
            mut driver,
            mut queue,
            mut cx,
            ..
        } = f;
        driver.take_used();
        let event_idx = features & RING_F_EVENT_IDX != 0;
        let guest = move |turn| match turn {
            Turn::Prepare => {
                while driver.take_used().is_some() {}
                driver.set_interrupts(false);
                driver.offer(0);
                driver.publish();
                false
            }
            Turn::Act => {
                if event_idx {
                    driver.set_used_event(driver.next_used());
                } else {
                    driver.set_interrupts(true);
                }
                fence(Ordering::SeqCst);
                driver.used_idx() != driver.next_used()
            }
        };
        let device = |turn| match turn {
            Turn::Prepare => {
                let popped = loop {
                    let (popped, _) = pop(&mut queue, &mut cx).unwrap();
                    if !popped.is_empty() {
                        break popped;
                    }
                    std::hint::spin_loop();
                };
                finish(&mut queue, &mut cx, &popped, 0);
                false
            }
            Turn::Act => queue.publish(&mut cx),
        };
        assert_eq!(race(guest, device), 0, "interrupts were lost");
    }
}

const REQUESTS: u32 = 20_000;

fn sleep_and_wake(features: u64) {
    let event_idx = features & RING_F_EVENT_IDX != 0;
    let memory = TestMemory::new(&REGIONS);
    memory.write(HEADER, &header(T_IN, 0));
    let driver = Driver::new(&memory, RINGS, 16, event_idx);
    driver.put_indirect(0, TABLE, &read_chain());
    driver.put_indirect(1, TABLE, &read_chain());
    let setup = driver.setup(features);
    let kick = setup.kick.try_clone().unwrap();
    let call = setup.call.as_ref().unwrap().try_clone().unwrap();
    let guest = memory.guest().clone();
    let queue = BlkQueue::new(setup, guest, None, None, Arc::new(device())).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let server = {
        let (kick, done) = (kick.try_clone().unwrap(), done.clone());
        std::thread::spawn(move || serve_and_sleep(queue, &kick, &done))
    };
    let mut driver = driver;
    let mut answered = 0;
    let mut offered = 0;
    while answered < REQUESTS {
        // Offers one or two requests at a time.
        let more = 1 + offered % 2;
        (0..more).for_each(|head| driver.offer(head as u16));
        offered += more;
        if driver.publish() {
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        }
        loop {
            while driver.take_used().is_some() {
                answered += 1;
            }
            if answered == offered {
                break;
            }
            // Like Linux's virtqueue_enable_cb: request an interrupt, then check again.
            driver.set_used_event(driver.next_used());
            fence(Ordering::SeqCst);
            if driver.used_idx() == driver.next_used() {
                assert!(wait(&call), "an interrupt was lost at {answered}");
            }
        }
    }
    done.store(true, Ordering::Release);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    server.join().unwrap();
}

fn serve_and_sleep(mut queue: BlkQueue, kick: &std::os::fd::OwnedFd, done: &AtomicBool) {
    let mut cx = context(16);
    while !done.load(Ordering::Acquire) {
        queue.disarm();
        let (popped, _) = pop(&mut queue, &mut cx).unwrap();
        if !popped.is_empty() {
            finish(&mut queue, &mut cx, &popped, 0);
            if queue.publish(&mut cx) {
                queue.notify();
            }
        } else if !queue.arm() {
            assert!(wait(kick), "a kick was lost");
        }
    }
}

/// Waits for an eventfd; returns false after an absurdly long time.
fn wait(event: &std::os::fd::OwnedFd) -> bool {
    let mut poll = libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(event),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd.
    let ready = unsafe { libc::poll(&mut poll, 1, 60_000) };
    signalled(event);
    ready == 1
}
