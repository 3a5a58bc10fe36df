//! Malformed chains, and invalid queues.

use super::fixture::*;
use crate::features::{RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::queue::RingError;
use crate::request::T_IN;
use crate::testing::{Buffer, NEXT, WRITE, disk, finish, pop, signalled};
use crate::{BlkQueue, QueueError, QueueSetup};
use fathom_core::Source;

const INDIRECT: u16 = 4;

fn h() -> Buffer {
    Buffer::readable(HEADER, 16)
}

fn d() -> Buffer {
    Buffer::writable(DATA, 512)
}

fn s() -> Buffer {
    Buffer::writable(STATUS, 1)
}

fn table(len: u32) -> Buffer {
    Buffer::readable(TABLE, len)
}

/// Returns what the driver gets back for a chain that begins with descriptor 0.
fn outcome(f: &mut Fixture) -> (usize, u32) {
    f.header(T_IN, 0);
    f.driver.offer(0);
    f.driver.publish();
    let (popped, _) = pop(&mut f.queue, &mut f.cx).expect("not broken");
    finish(&mut f.queue, &mut f.cx, &popped, 0);
    f.queue.publish(&mut f.cx);
    let (head, len) = f.driver.take_used().expect("always returned");
    assert_eq!((head, f.driver.take_used()), (0, None));
    (popped.len(), len)
}

const ACCEPTED: (usize, u32) = (1, 513);
const REFUSED: (usize, u32) = (0, 0);

/// Writes a chain.
type Build = fn(&Fixture);

fn check(cases: &[(&str, Build)], expected: (usize, u32)) {
    for (name, build) in cases {
        let mut f = Fixture::new(disk(), FEATURES);
        build(&f);
        assert_eq!(outcome(&mut f), expected, "{name}");
    }
}

#[test]
fn chains_that_lead_nowhere_come_back_untouched() {
    let cases: [(&str, Build); 6] = [
        ("a loop of one", |f| f.driver.put(RINGS, 0, h(), NEXT, 0)),
        ("a loop of two", |f| {
            f.driver.put(RINGS, 0, h(), NEXT, 1);
            f.driver.put(RINGS, 1, d(), NEXT | WRITE, 0);
        }),
        ("next outside the table", |f| {
            f.driver.put(RINGS, 0, h(), NEXT, 16)
        }),
        ("a loop in a table", |f| {
            f.driver.put(TABLE, 0, h(), NEXT, 1);
            f.driver.put(TABLE, 1, d(), NEXT | WRITE, 1);
            f.driver.put(RINGS, 0, table(48), INDIRECT, 0);
        }),
        ("next outside a table", |f| {
            f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
            f.driver.put(RINGS, 0, table(32), INDIRECT, 0);
        }),
        ("next outside a table, with an entry to spare", |f| {
            f.driver.put(TABLE, 0, h(), NEXT, 2);
            f.driver
                .put(TABLE, 2, Buffer::writable(DATA, 513), WRITE, 0);
            f.driver.put(RINGS, 0, table(32), INDIRECT, 0);
        }),
    ];
    check(&cases, REFUSED);
}

#[test]
fn tables_that_cannot_be_come_back_untouched() {
    let cases: [(&str, Build); 10] = [
        ("an empty table", |f| {
            f.driver.put(RINGS, 0, table(0), INDIRECT, 0)
        }),
        ("a table and a bit", |f| {
            f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
            f.driver.put(RINGS, 0, table(49), INDIRECT, 0);
        }),
        ("a huge table", |f| {
            f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
            f.driver.put(RINGS, 0, table(1025 * 16), INDIRECT, 0);
        }),
        ("a table outside memory", |f| {
            f.driver
                .put(RINGS, 0, Buffer::readable(END, 48), INDIRECT, 0)
        }),
        ("a table partly outside memory", |f| {
            f.driver
                .put(RINGS, 0, Buffer::readable(END - 40, 48), INDIRECT, 0)
        }),
        ("a table that wraps around", |f| {
            f.driver
                .put(RINGS, 0, Buffer::readable(u64::MAX - 15, 48), INDIRECT, 0)
        }),
        ("a table with a successor", |f| {
            f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
            f.driver.put(RINGS, 0, table(48), INDIRECT | NEXT, 1);
        }),
        ("a table in a table", |f| {
            f.driver.put_chain(TABLE + 64, 0, &[h(), d(), s()]);
            f.driver
                .put(TABLE, 0, Buffer::readable(TABLE + 64, 48), INDIRECT, 0);
            f.driver.put(RINGS, 0, table(16), INDIRECT, 0);
        }),
        ("a table in a table that would do for a header", |f| {
            f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
            f.driver.put(TABLE, 0, h(), INDIRECT | NEXT, 1);
            f.driver.put(RINGS, 0, table(48), INDIRECT, 0);
        }),
        ("a table later in a table", |f| {
            f.driver.put_chain(TABLE + 64, 0, &[d(), s()]);
            f.driver.put(TABLE, 0, h(), NEXT, 1);
            f.driver
                .put(TABLE, 1, Buffer::readable(TABLE + 64, 32), INDIRECT, 0);
            f.driver.put(RINGS, 0, table(32), INDIRECT, 0);
        }),
    ];
    check(&cases, REFUSED);
}

#[test]
fn a_table_may_follow_direct_descriptors() {
    let cases: [(&str, Build); 1] = [(
        "direct descriptors, then a table (2.7.5.3.2), its write flag ignored",
        |f| {
            f.driver.put_chain(TABLE, 0, &[d(), s()]);
            f.driver.put(RINGS, 0, h(), NEXT, 5);
            f.driver.put(RINGS, 5, table(32), INDIRECT | WRITE, 0);
        },
    )];
    check(&cases, ACCEPTED);
}

#[test]
fn a_table_may_have_as_many_entries_as_the_largest_queue() {
    let cases: [(&str, Build); 1] = [("1024 entries", |f| {
        f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
        f.driver.put(RINGS, 0, table(1024 * 16), INDIRECT, 0);
    })];
    check(&cases, ACCEPTED);
}

#[test]
fn tables_need_their_feature() {
    let mut f = Fixture::new(disk(), FEATURES & !RING_F_INDIRECT_DESC);
    f.driver.put_indirect(0, TABLE, &[h(), d(), s()]);
    assert_eq!(outcome(&mut f), REFUSED);
}

#[test]
fn a_chain_may_use_the_whole_queue_in_any_order() {
    let mut f = Fixture::new(disk(), FEATURES);
    let mut order: Vec<u16> = (1..16).collect();
    order.reverse();
    f.driver.put(RINGS, 0, h(), NEXT, order[0]);
    for pair in order.windows(2) {
        f.driver.put(RINGS, pair[0], d(), NEXT | WRITE, pair[1]);
    }
    f.driver.put(RINGS, order[14], s(), WRITE, 0);
    assert_eq!(outcome(&mut f), (1, 14 * 512 + 1));
}

#[test]
fn tables_may_be_unaligned_or_span_regions() {
    for at in [TABLE + 1, TABLE + 8, SEAM - 16, SEAM - 7] {
        let mut f = Fixture::new(disk(), FEATURES);
        f.driver.put_chain(TABLE, 0, &[h(), d(), s()]);
        let bytes = f.memory.read(TABLE, 48);
        f.memory.write(at, &bytes);
        f.driver
            .put(RINGS, 0, Buffer::readable(at, 48), INDIRECT, 0);
        assert_eq!(outcome(&mut f), ACCEPTED, "{at:#x}");
    }
}

#[test]
fn a_malformed_chain_does_not_hold_up_its_neighbours() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_IN, 0);
    f.driver.put(RINGS, 0, h(), NEXT, 0);
    f.driver.put_direct(1, &[h(), d(), s()]);
    for head in [1, 0, 1, 0] {
        f.driver.offer(head);
    }
    f.driver.publish();
    let (popped, answered) = pop(&mut f.queue, &mut f.cx).unwrap();
    assert_eq!((popped.len(), answered), (2, 2));
    finish(&mut f.queue, &mut f.cx, &popped, 0);
    f.queue.publish(&mut f.cx);
    let used: Vec<_> = std::iter::from_fn(|| f.driver.take_used()).collect();
    assert_eq!(used, [(0, 0), (0, 0), (1, 513), (1, 513)]);
}

#[test]
fn no_more_is_popped_than_there_is_room_for() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_IN, 0);
    f.driver.put_direct(1, &[h(), d(), s()]);
    (0..5).for_each(|_| f.driver.offer(1));
    f.driver.publish();
    let mut batch = Vec::new();
    f.queue.pop(&mut f.cx, 3, &mut batch).unwrap();
    assert_eq!(batch.len(), 3);
    assert!(f.queue.pending());
    f.queue.pop(&mut f.cx, 3, &mut batch).unwrap();
    assert_eq!(batch.len(), 5);
    assert!(!f.queue.pending());
}

#[test]
fn what_finds_no_slot_is_popped_later_in_order() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_IN, 0);
    for head in [4, 2, 6] {
        f.driver.put_indirect(head, TABLE, &[h(), d(), s()]);
        f.driver.offer(head);
    }
    f.driver.publish();
    // Only one slot is left.
    let slots: Vec<_> = std::iter::from_fn(|| f.cx.slab.take()).collect();
    f.cx.slab.put(slots[0]);
    for head in [4, 2, 6] {
        assert!(f.queue.pending() && f.queue.arm());
        let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
        let heads: Vec<u16> = popped.iter().map(|id| f.cx.slab[*id].tag).collect();
        assert_eq!(heads, [head]);
        finish(&mut f.queue, &mut f.cx, &popped, 0);
    }
    assert!(!f.queue.pending() && !f.queue.arm());
}

#[test]
fn a_head_made_available_many_times_harms_nobody() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_IN, 0);
    f.driver.put_direct(0, &[h(), d(), s()]);
    f.driver.put(RINGS, 5, h(), NEXT, 5);
    for round in 0..3 {
        // The queue is full of malformed chains, and one head is available many times in addition.
        let mut all = Vec::new();
        f.driver.set_used_event(f.driver.used_idx());
        for head in [5, 0] {
            (0..16).for_each(|_| f.driver.offer(head));
            f.driver.publish();
            all.extend(pop(&mut f.queue, &mut f.cx).unwrap().0);
        }
        assert_eq!(all.len(), 16);
        finish(&mut f.queue, &mut f.cx, &all, 0);
        // No reply overwrites one that the driver has not seen.
        assert_eq!(f.driver.used_idx(), round * 32 + 16);
        assert!(f.queue.publish(&mut f.cx));
    }
    assert_eq!(f.driver.used_idx(), 3 * 32);
}

#[test]
fn a_driver_that_breaks_the_ring_stops_its_queue() {
    let broken = |f: &mut Fixture| {
        let error = pop(&mut f.queue, &mut f.cx).expect_err("broken");
        let (setup, _) = take(f);
        assert_eq!(signalled(setup.err.as_ref().unwrap()), Some(1));
        error.to_string()
    };
    let mut f = Fixture::new(disk(), FEATURES);
    f.driver.force_avail_idx(17);
    assert_eq!(
        broken(&mut f),
        "queue 0: the driver's avail index jumped from 0 to 17, past the queue's 16 entries"
    );
    let mut f = Fixture::new(disk(), FEATURES);
    f.driver.offer(16);
    f.driver.publish();
    assert_eq!(
        broken(&mut f),
        "queue 0: the driver made descriptor 16 available, of 16"
    );
    let mut f = Fixture::new(disk(), FEATURES);
    f.memory.guest().poison();
    assert_eq!(
        broken(&mut f),
        "queue 0: the front-end has truncated its memory"
    );
}

/// Replaces the fixture's queue and takes the old one apart.
fn take(f: &mut Fixture) -> (QueueSetup, Option<crate::InflightQueue>) {
    let fresh = Fixture::new(disk(), FEATURES).queue;
    std::mem::replace(&mut f.queue, fresh).into_parts()
}

#[test]
fn a_queue_taken_apart_goes_on_where_it_was() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_IN, 0);
    f.driver.put_direct(1, &[h(), d(), s()]);
    (0..5).for_each(|_| f.driver.offer(1));
    f.driver.publish();
    let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
    finish(&mut f.queue, &mut f.cx, &popped, 0);
    f.queue.publish(&mut f.cx);
    let (setup, _) = take(&mut f);
    assert_eq!(setup.base, 5);
    signalled(setup.call.as_ref().unwrap());
    let memory = f.memory.guest().clone();
    f.queue = BlkQueue::new(setup, memory, None, None, f.device.clone()).unwrap();
    f.driver.offer(1);
    f.driver.publish();
    assert_eq!(pop(&mut f.queue, &mut f.cx).unwrap().0.len(), 1);
    let (setup, _) = take(&mut f);
    let interrupts = signalled(setup.call.as_ref().unwrap());
    assert_eq!(
        interrupts,
        Some(1),
        "an interrupt may have been lost before"
    );
}

#[test]
fn rings_that_cannot_be_are_refused() {
    let f = Fixture::new(disk(), FEATURES);
    let attempt = |change: fn(&mut QueueSetup)| {
        let mut setup = f.driver.setup(RING_F_EVENT_IDX);
        change(&mut setup);
        let memory = f.memory.guest().clone();
        match BlkQueue::new(setup, memory, None, None, f.device.clone()) {
            Err(QueueError::Ring { source, .. }) => source,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("accepted"),
        }
    };
    for size in [0, 3, 2048] {
        let change: fn(&mut QueueSetup) = match size {
            0 => |s| s.size = 0,
            3 => |s| s.size = 3,
            _ => |s| s.size = 2048,
        };
        assert_eq!(attempt(change), RingError::Size(size));
    }
    let misaligned: [fn(&mut QueueSetup); 3] = [
        |s| s.desc_addr += 8,
        |s| s.avail_addr += 1,
        |s| s.used_addr += 2,
    ];
    for change in misaligned {
        assert!(matches!(attempt(change), RingError::Alignment { .. }));
    }
    let outside: [fn(&mut QueueSetup); 5] = [
        |s| s.desc_addr = 0,
        |s| s.avail_addr = u64::MAX - 1,
        |s| s.used_addr += SEAM - 0x1180,
        |s| s.desc_addr += SEAM - 0x1010,
        |s| s.avail_addr += END,
    ];
    for change in outside {
        assert!(matches!(attempt(change), RingError::Outside { .. }));
    }
}
