//! Status and used length of each kind of request.

use super::fixture::*;
use crate::features::*;
use crate::request::{SEG_MAX, T_DISCARD, T_FLUSH, T_GET_ID, T_IN, T_OUT, T_WRITE_ZEROES};
use crate::testing::{Buffer, disk, finish, pop};
use fathom_core::{DiskInfo, Op};

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

fn r(gpa: u64, len: u32) -> Buffer {
    Buffer::readable(gpa, len)
}

fn w(gpa: u64, len: u32) -> Buffer {
    Buffer::writable(gpa, len)
}

const H: Buffer = Buffer {
    gpa: HEADER,
    len: 16,
    writable: false,
};
const S: Buffer = Buffer {
    gpa: STATUS,
    len: 1,
    writable: true,
};

/// The outcome of a request.
#[derive(Debug, PartialEq)]
enum Fate {
    /// The request reaches the disk: operation, offset, length, fua, unmap.
    Disk(Op, u64, u64, bool, bool),
    /// The request is answered at once: status (if one is written), used length.
    Answer(Option<u8>, u32),
}

fn refused(status: u8) -> Fate {
    Fate::Answer(Some(status), 1)
}

fn disk_op(op: Op, offset: u64, len: u64) -> Fate {
    Fate::Disk(op, offset, len, false, false)
}

struct Case {
    disk: DiskInfo,
    features: u64,
    kind: u32,
    sector: u64,
    payload: [u8; 16],
}

impl Case {
    fn new(kind: u32, sector: u64) -> Case {
        Case {
            disk: disk(),
            features: FEATURES,
            kind,
            sector,
            payload: [FILL; 16],
        }
    }

    fn range(kind: u32, payload: [u8; 16]) -> Case {
        Case {
            payload,
            ..Case::new(kind, 0)
        }
    }

    /// Runs the chain directly and indirectly. Checks the properties that all requests share: one
    /// used element, one status byte, nothing else written.
    fn run(&self, buffers: &[Buffer]) -> Fate {
        let indirect = self.run_as(buffers, true);
        if buffers.len() <= 16 {
            assert_eq!(self.run_as(buffers, false), indirect, "direct and indirect");
        }
        indirect
    }

    fn run_as(&self, buffers: &[Buffer], indirect: bool) -> Fate {
        let mut f = Fixture::new(self.disk.clone(), self.features);
        f.memory.write(DATA, &[FILL; 0x100]);
        f.memory.write(DATA, &self.payload);
        f.memory.write(STATUS - 8, &[FILL; 32]);
        f.header(self.kind, self.sector);
        f.offer(indirect, buffers);
        let before = f.memory.read(HEADER, (END - HEADER) as usize);
        let (popped, answered) = pop(&mut f.queue, &mut f.cx).unwrap();
        assert_eq!(popped.len() + answered as usize, 1);
        let fate = popped.first().map(|id| {
            let request = &f.cx.slab[*id];
            let sum: usize = request.segments.iter().map(|s| s.iov_len).sum();
            let moves_data = matches!(request.op, Op::Read | Op::Write);
            assert_eq!(sum as u64, if moves_data { request.len } else { 0 });
            let (op, offset, len) = (request.op, request.offset, request.len);
            Fate::Disk(op, offset, len, request.fua, request.unmap)
        });
        finish(&mut f.queue, &mut f.cx, &popped, 0);
        fathom_core::Source::publish(&mut f.queue, &mut f.cx);
        let (head, written) = f.driver.take_used().expect("always returned");
        assert_eq!(head, 0);
        assert_eq!(f.driver.take_used(), None, "returned once");
        let after = f.memory.read(HEADER, (END - HEADER) as usize);
        let changed: Vec<u64> = (0..before.len())
            .filter(|i| before[*i] != after[*i])
            .map(|i| HEADER + i as u64)
            .collect();
        let status = changed.last().map(|at| after[(at - HEADER) as usize]);
        match fate {
            Some(fate) => {
                assert_eq!((changed.len(), status), (1, Some(OK)), "{changed:x?}");
                assert_eq!(f.cx.refused, 0);
                let data = match fate {
                    Fate::Disk(Op::Read, _, len, ..) => len as u32,
                    _ => 0,
                };
                assert_eq!(written, data + 1);
                fate
            }
            None => {
                assert_eq!(changed.len(), written as usize, "{changed:x?}");
                assert_eq!(f.cx.refused, u64::from(status != Some(OK)), "counted");
                Fate::Answer(status, written)
            }
        }
    }
}

#[test]
fn reads_and_writes_reach_the_disk_however_they_are_framed() {
    let framings: [(&str, Vec<Buffer>, Vec<Buffer>); 5] = [
        (
            "plain",
            vec![H, w(DATA, 1024), S],
            vec![H, r(DATA, 1024), S],
        ),
        (
            "split header",
            vec![
                r(HEADER, 3),
                r(HEADER + 3, 12),
                r(HEADER + 15, 1),
                w(DATA, 1024),
                S,
            ],
            vec![r(HEADER, 8), r(HEADER + 8, 8), r(DATA, 1024), S],
        ),
        (
            "one buffer a direction",
            vec![H, w(STATUS - 1024, 1025)],
            vec![r(HEADER, 16 + 1024), S],
        ),
        (
            "odd pieces",
            vec![H, w(DATA, 1), w(DATA + 1, 511), w(STATUS - 512, 513)],
            vec![r(HEADER, 17), r(DATA, 1022), r(DATA + 2000, 1), S],
        ),
        (
            "across the seam of two regions",
            vec![H, w(SEAM - 512, 1024), S],
            vec![H, r(SEAM - 24, 1024), S],
        ),
    ];
    for (name, read, write) in framings {
        let fate = Case::new(T_IN, 5).run(&read);
        assert_eq!(fate, disk_op(Op::Read, 5 * 512, 1024), "{name}");
        let fate = Case::new(T_OUT, 5).run(&write);
        assert_eq!(fate, disk_op(Op::Write, 5 * 512, 1024), "{name}");
    }
    assert_eq!(Case::new(T_FLUSH, 0).run(&[H, S]), disk_op(Op::Flush, 0, 0));
}

#[test]
fn headers_and_tables_may_lie_across_a_seam() {
    let mut f = Fixture::new(disk(), FEATURES);
    let (table, head) = (SEAM - 24, SEAM + 0x1000 - 8);
    f.memory.write(head, &header(T_IN, 1));
    f.memory.write(SEAM - 0x1008, &header(T_IN, 1));
    f.driver.put(table, 0, r(SEAM - 0x1008, 16), 1, 1);
    // The table's second entry spans the boundary of two regions.
    let entry = |gpa: u64, len: u32, flags: u16, next: u16| {
        let mut bytes = gpa.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        bytes
    };
    f.memory.write(table + 16, &entry(DATA, 512, 3, 2));
    f.memory.write(table + 32, &entry(STATUS, 1, 2, 0));
    f.driver.put(f.driver.desc_gpa(), 3, r(table, 48), 4, 0);
    f.driver.offer(3);
    f.driver.publish();
    let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
    assert_eq!(popped.len(), 1);
    assert_eq!(f.cx.slab[popped[0]].offset, 512);
}

#[test]
fn malformed_requests_get_an_error_in_their_status_byte() {
    let end = disk().size / 512;
    let many = |n: usize| {
        let mut chain = vec![H];
        chain.extend((0..n).map(|_| w(DATA, 512)));
        chain.push(S);
        chain
    };
    let full = Fate::Disk(Op::Read, 0, 512 * SEG_MAX as u64, false, false);
    assert_eq!(Case::new(T_IN, 0).run(&many(SEG_MAX)), full);
    let with_status = |mut chain: Vec<Buffer>| {
        chain.truncate(chain.len() - 2);
        chain.push(w(STATUS - 512, 513));
        chain
    };
    let last_with_status = with_status(many(SEG_MAX));
    assert_eq!(Case::new(T_IN, 0).run(&last_with_status), full);
    let cases: [(&str, u32, u64, Vec<Buffer>); 25] = [
        ("too many segments", T_IN, 0, many(SEG_MAX + 1)),
        ("too many segments", T_IN, 0, with_status(many(SEG_MAX + 1))),
        ("no data to read", T_IN, 0, vec![H, S]),
        ("no data to write", T_OUT, 0, vec![H, S]),
        ("not whole sectors", T_IN, 0, vec![H, w(DATA, 511), S]),
        ("not whole sectors", T_OUT, 0, vec![H, r(DATA, 513), S]),
        ("beyond the end", T_IN, end, vec![H, w(DATA, 512), S]),
        ("across the end", T_OUT, end - 1, vec![H, r(DATA, 1024), S]),
        ("sector overflows", T_IN, u64::MAX, vec![H, w(DATA, 512), S]),
        (
            "sector * 512 overflows",
            T_IN,
            1 << 55,
            vec![H, w(DATA, 512), S],
        ),
        (
            "read from a readable buffer",
            T_IN,
            0,
            vec![H, r(DATA, 512), S],
        ),
        (
            "write to a writable buffer",
            T_OUT,
            0,
            vec![H, w(DATA, 512), S],
        ),
        ("both", T_OUT, 0, vec![H, r(DATA, 512), w(DATA, 512), S]),
        ("readable after writable", T_IN, 0, vec![w(DATA, 512), H, S]),
        (
            "readable between writable",
            T_IN,
            0,
            vec![H, w(DATA, 512), r(DATA, 512), S],
        ),
        ("outside memory", T_IN, 0, vec![H, w(END, 512), S]),
        (
            "partly outside memory",
            T_OUT,
            0,
            vec![H, r(END - 256, 512), S],
        ),
        ("wraps around", T_IN, 0, vec![H, w(u64::MAX - 255, 512), S]),
        ("empty data", T_IN, 0, vec![H, w(DATA, 0), w(DATA, 512), S]),
        ("empty data", T_OUT, 0, vec![H, r(DATA, 512), r(DATA, 0), S]),
        (
            "header outside memory",
            T_IN,
            0,
            vec![r(END, 16), w(DATA, 512), S],
        ),
        (
            "split header outside",
            T_IN,
            0,
            vec![r(HEADER, 8), r(END, 8), w(DATA, 512), S],
        ),
        ("short header", T_FLUSH, 0, vec![r(HEADER, 15), S]),
        (
            "empty part of a header",
            T_FLUSH,
            0,
            vec![r(HEADER, 0), H, S],
        ),
        ("flush with data", T_FLUSH, 0, vec![H, r(DATA, 512), S]),
    ];
    for (name, kind, sector, buffers) in cases {
        let fate = Case::new(kind, sector).run(&buffers);
        assert_eq!(fate, refused(IOERR), "{name}");
    }
}

#[test]
fn a_chain_without_a_status_byte_comes_back_untouched() {
    let cases: [(&str, Vec<Buffer>); 5] = [
        ("nothing writable", vec![H, r(DATA, 512)]),
        ("empty status", vec![H, w(DATA, 512), w(STATUS, 0)]),
        ("status outside memory", vec![H, w(DATA, 512), w(END, 1)]),
        ("status ends outside memory", vec![H, w(END - 512, 513)]),
        ("status wraps around", vec![H, w(u64::MAX, 2)]),
    ];
    for (name, buffers) in cases {
        let fate = Case::new(T_IN, 0).run(&buffers);
        assert_eq!(fate, Fate::Answer(None, 0), "{name}");
    }
}

#[test]
fn unknown_types_are_unsupported() {
    for kind in [2, 3, 5, 6, 9, 10, 12, 14, 0x8000_0000, u32::MAX] {
        let fate = Case::new(kind, 0).run(&[H, r(DATA, 512), S]);
        assert_eq!(fate, refused(UNSUPP), "{kind}");
    }
}

#[test]
fn the_serial_number_is_written_as_far_as_it_fits() {
    let id = |chain: &[Buffer]| Case::new(T_GET_ID, 0).run(chain);
    // 15 bytes of the serial number, zero-padded to 20.
    assert_eq!(id(&[H, w(DATA, 20), S]), Fate::Answer(Some(OK), 21));
    assert_eq!(id(&[H, w(DATA, 64), S]), Fate::Answer(Some(OK), 21));
    assert_eq!(
        id(&[H, w(DATA, 3), w(DATA + 9, 4), S]),
        Fate::Answer(Some(OK), 8)
    );
    assert_eq!(id(&[H, S]), refused(IOERR));

    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_GET_ID, 0);
    f.offer(true, &[H, w(DATA, 20), S]);
    pop(&mut f.queue, &mut f.cx).unwrap();
    assert_eq!(f.memory.read(DATA, 20), b"a serial number\0\0\0\0\0");
}

#[test]
fn ranges_are_checked_flag_by_flag() {
    let run = |kind, payload| Case::range(kind, payload).run(&[H, r(DATA, 16), S]);
    let done = |op, unmap| Fate::Disk(op, 1024, 4096, false, unmap);
    let end = disk().size / 512;
    assert_eq!(run(T_DISCARD, range(2, 8, 0)), done(Op::Discard, false));
    assert_eq!(run(T_DISCARD, range(2, 8, 1)), refused(UNSUPP));
    assert_eq!(
        run(T_WRITE_ZEROES, range(2, 8, 0)),
        done(Op::WriteZeroes, false)
    );
    assert_eq!(
        run(T_WRITE_ZEROES, range(2, 8, 1)),
        done(Op::WriteZeroes, true)
    );
    for kind in [T_DISCARD, T_WRITE_ZEROES] {
        assert_eq!(run(kind, range(2, 8, 2)), refused(UNSUPP));
        assert_eq!(run(kind, range(2, 8, 1 << 31)), refused(UNSUPP));
        assert_eq!(run(kind, range(2, 0, 0)), refused(IOERR), "empty");
        assert_eq!(
            run(kind, range(end, 1, 0)),
            refused(IOERR),
            "beyond the end"
        );
        assert_eq!(
            run(kind, range(end - 1, 2, 0)),
            refused(IOERR),
            "across the end"
        );
        assert_eq!(
            run(kind, range(u64::MAX, 2, 0)),
            refused(IOERR),
            "overflows"
        );
        assert_eq!(run(kind, range(0, u32::MAX, 0)), refused(IOERR), "too long");
        let case = Case::range(kind, range(2, 8, 0));
        assert_eq!(
            case.run(&[H, r(DATA, 32), S]),
            refused(UNSUPP),
            "two ranges"
        );
        assert_eq!(
            case.run(&[H, r(DATA, 17), S]),
            refused(IOERR),
            "a range and a bit"
        );
        assert_eq!(case.run(&[H, S]), refused(IOERR), "none");
        assert_eq!(case.run(&[H, r(DATA, 16), w(DATA, 1), S]), refused(IOERR));
        let pieces = [H, r(DATA, 5), r(DATA + 5, 3), r(DATA + 8, 8), S];
        assert!(matches!(case.run(&pieces), Fate::Disk(_, 1024, 4096, ..)));
        // A range of the announced maximum length, on a disk with room for more.
        let mut case = Case::range(kind, range(2, 8, 0));
        for limits in [&mut case.disk.discard, &mut case.disk.write_zeroes] {
            limits.as_mut().unwrap().max_len = 4096;
        }
        let longest = case.run(&[H, r(DATA, 16), S]);
        assert!(matches!(longest, Fate::Disk(_, 1024, 4096, ..)));
        case.payload = range(2, 9, 0);
        assert_eq!(
            case.run(&[H, r(DATA, 16), S]),
            refused(IOERR),
            "longer than announced"
        );
    }
}

#[test]
fn disks_refuse_what_they_did_not_offer() {
    let mut plain = Case::range(T_DISCARD, range(2, 8, 0));
    plain.disk.discard = None;
    plain.disk.write_zeroes = None;
    assert_eq!(plain.run(&[H, r(DATA, 16), S]), refused(UNSUPP));
    plain.kind = T_WRITE_ZEROES;
    assert_eq!(plain.run(&[H, r(DATA, 16), S]), refused(UNSUPP));

    let mut read_only = Case::range(T_OUT, range(2, 8, 0));
    read_only.disk.read_only = true;
    assert_eq!(read_only.run(&[H, r(DATA, 512), S]), refused(IOERR));
    for kind in [T_DISCARD, T_WRITE_ZEROES] {
        read_only.kind = kind;
        assert_eq!(read_only.run(&[H, r(DATA, 16), S]), refused(IOERR));
    }
    read_only.kind = T_FLUSH;
    assert_eq!(read_only.run(&[H, S]), disk_op(Op::Flush, 0, 0));
    read_only.kind = T_IN;
    let read = read_only.run(&[H, w(DATA, 512), S]);
    assert_eq!(read, disk_op(Op::Read, 0, 512));
}

#[test]
fn writes_are_durable_if_the_driver_cannot_flush() {
    for (kind, len) in [(T_OUT, 512), (T_DISCARD, 16), (T_WRITE_ZEROES, 16)] {
        let fua = |features, writeback| {
            let mut case = Case::range(kind, range(0, 1, 0));
            case.features = features;
            case.disk.write_cache = writeback;
            match case.run_as(&[H, r(DATA, len), S], features & RING_F_INDIRECT_DESC != 0) {
                Fate::Disk(op, _, _, fua, _) if op != Op::Read => fua,
                other => panic!("{other:?}"),
            }
        };
        assert!(!fua(FEATURES, true));
        assert!(fua(FEATURES, false));
        assert!(fua(0, true), "neither FLUSH nor CONFIG_WCE");
        assert!(fua(BLK_F_CONFIG_WCE, true), "no FLUSH");
        assert!(!fua(BLK_F_FLUSH, false), "FLUSH alone means write-back");
    }
}

/// The driver may switch the cache off during operation. From then on it relies on completed writes
/// being durable.
#[test]
fn switching_the_cache_off_counts_for_the_next_write() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_OUT, 0);
    for writeback in [true, false, true] {
        f.device.set_writeback(writeback);
        f.offer(true, &[H, r(DATA, 512), S]);
        let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
        assert_eq!(f.cx.slab[popped[0]].fua, !writeback);
        finish(&mut f.queue, &mut f.cx, &popped, 0);
    }
}

/// A longer request does not fit into one system call. Four times this length does not fit into a
/// used length.
#[test]
fn a_gigabyte_is_moved_at_once_and_no_more() {
    for (kind, buffer) in [(T_IN, w(LARGE, LARGE_LEN)), (T_OUT, r(LARGE, LARGE_LEN))] {
        let mut case = Case::new(kind, 0);
        case.disk.size = 1 << 40;
        let mut chain = vec![buffer; 66];
        (chain[0], chain[65]) = (H, S);
        let moved = case.run(&chain);
        assert!(
            matches!(moved, Fate::Disk(_, 0, 0x4000_0000, ..)),
            "{moved:?}"
        );
        chain.insert(1, Buffer { len: 512, ..buffer });
        assert_eq!(case.run(&chain), refused(IOERR));
    }
}

#[test]
fn errors_of_the_disk_become_a_status() {
    let cases = [
        (libc::EIO, IOERR),
        (libc::ENOSPC, IOERR),
        (libc::EOPNOTSUPP, UNSUPP),
    ];
    for (errno, status) in cases {
        let mut f = Fixture::new(disk(), FEATURES);
        f.header(T_IN, 0);
        f.offer(true, &[H, w(DATA, 512), S]);
        let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
        finish(&mut f.queue, &mut f.cx, &popped, errno);
        fathom_core::Source::publish(&mut f.queue, &mut f.cx);
        assert_eq!(f.memory.read(STATUS, 1), [status]);
        assert_eq!(f.driver.take_used(), Some((0, 1)));
    }
}

#[test]
fn resizing_moves_the_end() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.header(T_IN, disk().size / 512);
    f.device.set_size(disk().size + 512);
    f.offer(true, &[H, w(DATA, 512), S]);
    assert_eq!(pop(&mut f.queue, &mut f.cx).unwrap().0.len(), 1);
    f.device.set_size(disk().size);
    f.driver.offer(0);
    f.driver.publish();
    assert_eq!(pop(&mut f.queue, &mut f.cx).unwrap().0.len(), 0);
}
