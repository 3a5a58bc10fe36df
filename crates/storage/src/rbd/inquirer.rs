//! A thread for operations that the library offers only as blocking calls: finding where an image
//! has data, and lengthening it.

use super::ended::{Found, Operation};
use super::image::Image;
use fathom_core::{ThreadKind, thread_starts};
use fathom_files::ImageFile;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Maximum length in bytes of one answer, which limits the number of objects to query.
const MAX_LEN: u64 = 4 << 30;
/// Maximum number of data ranges in one answer.
const MAX_RANGES: usize = 4096;

/// A question, and the operation that waits for its answer.
struct Question {
    operation: *const Operation,
    what: What,
}

#[derive(Clone, Copy)]
pub(super) enum What {
    /// Find the data in a range: its start and length in bytes.
    Status(u64, u64),
    /// Make the image at least this number of bytes long.
    Len(u64),
}

// SAFETY: the operation is in flight, and the thread that receives the question ends it.
unsafe impl Send for Question {}

/// The thread that asks the library. The thread ends when this value is dropped.
pub(super) struct Inquirer {
    questions: Option<Sender<Question>>,
    thread: Option<JoinHandle<()>>,
}

impl Inquirer {
    pub(super) fn start(image: Arc<Image>) -> io::Result<Inquirer> {
        let (questions, asked) = channel();
        let thread = Builder::new().name("rbd status".into()).spawn(move || {
            thread_starts(ThreadKind::General);
            answer(&image, &asked);
        })?;
        Ok(Inquirer {
            questions: Some(questions),
            thread: Some(thread),
        })
    }

    /// Sends a question to the thread, which ends the operation with the answer. Fails if the
    /// thread has ended.
    ///
    /// # Safety
    /// The operation lives until its completion is taken.
    pub(super) unsafe fn ask(&self, operation: *const Operation, what: What) -> Result<(), i32> {
        let questions = self.questions.as_ref().ok_or(libc::EIO)?;
        let question = Question { operation, what };
        questions.send(question).map_err(|_| libc::EIO)
    }
}

impl Drop for Inquirer {
    fn drop(&mut self) {
        self.questions = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn answer(image: &Image, asked: &Receiver<Question>) {
    for Question { operation, what } in asked {
        let done = match what {
            What::Status(at, len) => find(image, at, len.min(MAX_LEN)).map(|found| {
                // SAFETY: the operation is in flight until it is ended below.
                unsafe { (*operation).put(found) };
            }),
            What::Len(len) => lengthen(image, len),
        };
        let result = match done {
            Ok(()) => 0,
            Err(error) => -i64::from(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        // SAFETY: the operation is in flight and is ended once.
        unsafe { Operation::end(operation, result) };
    }
}

fn lengthen(image: &Image, len: u64) -> io::Result<()> {
    match ImageFile::len(image)? < len {
        true => image.set_len(len),
        false => Ok(()),
    }
}

fn find(image: &Image, at: u64, len: u64) -> io::Result<Found> {
    // No data exists beyond the image's end.
    let there = len.min(ImageFile::len(image)?.saturating_sub(at));
    let (mut data, is_cut) = match there {
        0 => (Vec::new(), false),
        there => image.data(at, there, MAX_RANGES)?,
    };
    data.sort_unstable();
    let end = match data.last() {
        Some((start, len)) if is_cut => start + len,
        _ => at + len,
    };
    Ok(Found { data, end })
}
