//! Tests of two workers that act at the same time, at the critical instants.

use super::bed::Bed;
use super::disk::at_once;
use super::io::BlockingIo;
use super::race::{self, Point};
use super::tables::Pinned;
use crate::{GuestOffset, HostOffset};
use fathom_core::Op;
use std::cell::Cell;
use std::rc::Rc;

const GUEST: GuestOffset = GuestOffset(128 << 10);

fn bed() -> Bed {
    Bed::new(&[], 1 << 20, |_| ())
}

fn write(bed: &mut Bed, fua: bool) -> i32 {
    bed.request(Op::Write, GUEST.0, 4096, fua)
}

fn is_clean(bed: &Bed) -> bool {
    let active = bed.disk.active().unwrap();
    active.top().unwrap().dirty.is_clean()
}

/// Returns the last step of another worker's write that allocates: linking its new cluster.
///
/// The image was flushed after the allocation.
fn write_about_to_link(bed: &Bed) -> impl FnOnce() + 'static {
    let active = bed.disk.active().unwrap();
    let tables = active.top().unwrap();
    let io = BlockingIo(&active.storages);
    let now = "nobody else uses the image";
    let run = at_once(tables.allocate(&io, 1, true)).expect(now).unwrap();
    let slice = at_once(tables.slice_to_change(&io, GUEST));
    let slice: Pinned = slice.expect(now).unwrap();
    at_once(tables.flush(&io)).expect(now).unwrap();
    assert!(tables.dirty.is_clean());
    let host: HostOffset = run.start(tables.layout.cluster_bits());
    let active = active.clone();
    move || {
        let tables = active.top().unwrap();
        let entry = tables.layout.entry(Some(host), 1, 0);
        let index = tables.index_of(GUEST);
        tables.link(&mut tables.state(), &slice, index, entry);
    }
}

#[test]
fn entry_is_published_in_an_image_that_is_dirty_already() {
    let bed = bed();
    let link = write_about_to_link(&bed);
    let seen = Rc::new(Cell::new(None));
    let active = bed.disk.active().unwrap();
    let see = seen.clone();
    race::at(Point::Published, move || {
        see.set(Some(active.top().unwrap().dirty.is_clean()));
    });
    link();
    assert!(race::is_done());
    assert_eq!(seen.get(), Some(false), "a FUA write would find it clean");
}

#[test]
fn fua_write_flushes_an_entry_linked_before_its_lookup() {
    let mut bed = bed();
    let link = write_about_to_link(&bed);
    race::at(Point::LookUp, link);
    assert_eq!(write(&mut bed, true), 0);
    assert!(race::is_done());
    assert!(
        is_clean(&bed),
        "the write was answered, its entry is volatile"
    );
}

#[test]
fn plain_write_keeps_an_entry_linked_before_its_lookup() {
    let mut bed = bed();
    let link = write_about_to_link(&bed);
    race::at(Point::LookUp, link);
    assert_eq!(write(&mut bed, false), 0);
    assert!(race::is_done());
    assert!(!is_clean(&bed));
}
