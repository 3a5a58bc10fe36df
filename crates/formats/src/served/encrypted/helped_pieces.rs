//! Lets helpers encrypt and decrypt large pieces, which take CPU time.

use super::piece::Piece;
use super::place::Place;
use crate::served::helpers::Helpers;
use crate::served::io::Buf;
use crate::served::pool::Pool;
use crate::served::task::Executor;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a piece from which on the gain exceeds the cost of passing it to a helper.
const LARGE: u64 = 128 << 10;

/// The operation on a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Encrypt,
    Decrypt,
}

/// A finished piece; without a buffer if its helper has panicked.
type Back = (Piece, Option<Buf>);

pub(super) struct HelpedPieces {
    helpers: Arc<Helpers>,
    executor: Executor,
    back: Rc<RefCell<Vec<Back>>>,
}

impl HelpedPieces {
    pub(super) fn new(helpers: &Arc<Helpers>) -> io::Result<HelpedPieces> {
        Ok(HelpedPieces {
            helpers: helpers.clone(),
            executor: Executor::new()?,
            back: Rc::default(),
        })
    }

    /// Returns the eventfd that is signalled when a piece may be finished.
    pub(super) fn fd(&self) -> RawFd {
        self.executor.fd()
    }

    /// Returns whether to use a helper. A single helper would only take turns with the worker.
    pub(super) fn helps_with(&self, piece: &Piece) -> bool {
        piece.len() >= LARGE && !self.helpers.is_one()
    }

    pub(super) fn send(
        &mut self,
        place: &Place,
        pool: &Rc<Pool>,
        work: Work,
        piece: Piece,
        buf: Buf,
    ) {
        let (helpers, back, pool) = (self.helpers.clone(), self.back.clone(), pool.clone());
        let (sectors, at) = (place.sectors.clone(), piece.outer.start);
        let shared = Arc::new(Mutex::new(Some(buf.loosen())));
        let job = move || {
            let mut loose = shared.lock().take()?;
            match work {
                Work::Encrypt => sectors.encrypt(loose.bytes_mut(), at),
                Work::Decrypt => sectors.decrypt(loose.bytes_mut(), at),
            }
            Some(loose)
        };
        self.executor.spawn(async move {
            let helped = helpers.run(job.clone()).await;
            // If no helper thread is available, this worker does it.
            let loose = helped.unwrap_or_else(job);
            let buf = loose.map(|loose| loose.back(&pool));
            back.borrow_mut().push((piece, buf));
        });
    }

    /// Runs the tasks that can make progress; false if no piece was finished.
    pub(super) fn go_on(&mut self) -> bool {
        !self.executor.is_idle() && self.executor.run() && !self.back.borrow().is_empty()
    }

    pub(super) fn next(&mut self) -> Option<Back> {
        self.back.borrow_mut().pop()
    }
}
