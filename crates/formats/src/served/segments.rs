//! The bytes of a write, and where they come from.

use super::io::{Buf, Payload};
use fathom_core::Segments;
use fathom_core::segments::{pieces, zeroes};
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// The source of a write's bytes.
#[derive(Clone)]
pub(super) enum Source {
    Guest(Segments),
    Own(Rc<Buf>),
    Zeroes,
}

impl Source {
    /// Appends the bytes `range` of this source to a payload.
    pub(super) fn append(&self, to: &mut Payload, range: Range<u64>) {
        match self {
            Source::Guest(segments) => to.segments.extend(pieces(segments, range)),
            Source::Own(buf) => {
                to.segments.extend(pieces(&[buf.iovec()], range));
                to.keep.push(buf.clone());
            }
            Source::Zeroes => to.segments.extend(zeroes(range.end - range.start)),
        }
    }

    pub(super) fn part(&self, range: Range<u64>) -> Payload {
        let mut payload = Payload {
            segments: Segments::new(),
            keep: SmallVec::new(),
        };
        self.append(&mut payload, range);
        payload
    }
}
