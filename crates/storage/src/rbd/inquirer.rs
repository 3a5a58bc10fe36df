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
    find_by(|there| image.data(at, there, MAX_RANGES), at, len, there)
}

/// Returns the data in `len` bytes from `at` on, of which the image has `there` bytes. `ask`
/// returns the data ranges in a number of bytes from `at` on, and whether they are incomplete.
///
/// The library reports ranges object by object. In a striped image, a range that is missing may lie
/// anywhere, so that an incomplete answer is useless.
fn find_by(
    ask: impl Fn(u64) -> io::Result<(Vec<(u64, u64)>, bool)>,
    at: u64,
    len: u64,
    mut there: u64,
) -> io::Result<Found> {
    let mut end = at + len;
    while there > 0 {
        let (mut data, is_incomplete) = ask(there)?;
        if !is_incomplete {
            data.sort_unstable();
            return Ok(Found { data, end });
        }
        there = (there / 2).next_multiple_of(512);
        end = at + there;
    }
    let data = Vec::new();
    Ok(Found { data, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stripe unit and number of objects of a striped image.
    const UNIT: u64 = 4096;
    const OBJECTS: u64 = 8;

    /// Returns the data of an image whose stripes all have data in their first half.
    fn ask(at: u64, len: u64) -> (Vec<(u64, u64)>, bool) {
        let of_object = |object| {
            let stripes = (0..).map(move |n| (n * OBJECTS + object) * UNIT);
            stripes.take_while(move |start| *start < at + len)
        };
        let all = (0..OBJECTS)
            .flat_map(of_object)
            .filter(|start| *start >= at);
        let found = all.map(|start| (start, UNIT / 2)).collect::<Vec<_>>();
        let is_cut = found.len() > MAX_RANGES;
        (found.into_iter().take(MAX_RANGES).collect(), is_cut)
    }

    #[test]
    fn no_data_of_a_striped_image_is_taken_for_a_gap() {
        let (size, mut at, mut answers) = (10_000 * UNIT, 0, 0);
        let mut data = Vec::new();
        while at < size {
            let len = size - at;
            let found = find_by(|there| Ok(ask(at, there)), at, len, len).expect("an answer");
            data.extend(found.data);
            assert!(found.end > at);
            (at, answers) = (found.end, answers + 1);
        }
        let all = (0..10_000).map(|n| (n * UNIT, UNIT / 2));
        assert!(data.into_iter().eq(all));
        assert!(answers < 10, "{answers}");
    }
}
