//! A disk as a stream, to standard output.

use crate::error::{Error, io_error};
use crate::job::State;
use crate::progress::Progress;
use crate::source::Opened;
use fathom_core::Op;
use fathom_stack::{Ask, Job, Pages};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Bytes of a request, and how many at once.
const PIECE: u64 = 512 << 10;
const DEPTH: usize = 16;

/// Writes a disk to standard output, from its first byte to its last.
pub(crate) fn to_standard_output(
    job: &Job,
    source: &Opened,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let mut output = Ordered {
        output: io::stdout().lock(),
        at: 0,
        waiting: BTreeMap::new(),
    };
    let mut in_flight = 0;
    let mut outcome = Ok(());
    for segment in source.segments(job, usize::MAX)? {
        let segment = segment?;
        let mut at = segment.range.start;
        while at < segment.range.end && outcome.is_ok() {
            let len = (segment.range.end - at).min(PIECE);
            if segment.state == State::Data {
                let pages = Pages::new(PIECE as usize).map_err(Error::memory)?;
                source.client.ask(Ask::new(Op::Read, at, len, Some(pages)));
                in_flight += 1;
            } else {
                outcome = output.put(at, len, None, progress);
            }
            at += len;
            while outcome.is_ok()
                && (in_flight >= DEPTH || output.waiting.len() >= DEPTH)
                && in_flight > 0
            {
                outcome = take(job, source, &mut output, progress);
                in_flight -= 1;
            }
            outcome = outcome.and_then(|()| progress.check());
        }
    }
    for _ in 0..in_flight {
        let taken = take(job, source, &mut output, progress);
        outcome = outcome.and(taken);
    }
    outcome?;
    output.output.flush().map_err(told)
}

fn told(source: io::Error) -> Error {
    io_error(Path::new("standard output"), "cannot be written")(source)
}

fn take(
    job: &Job,
    source: &Opened,
    output: &mut Ordered<'_>,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let answer = job.wait();
    let (ask, errno) = (answer.ask, answer.errno);
    if errno != 0 {
        return Err(Error::data(
            &source.path,
            "read",
            ask.offset,
            ask.len,
            errno,
        ));
    }
    output.put(ask.offset, ask.len, ask.pages, progress)
}

/// What was read, in the order in which it has to be written.
struct Ordered<'a> {
    output: io::StdoutLock<'a>,
    /// Bytes written.
    at: u64,
    /// By offset: how long it is, and what; zeroes, if it is nothing.
    waiting: BTreeMap<u64, (u64, Option<Pages>)>,
}

impl Ordered<'_> {
    fn put(
        &mut self,
        offset: u64,
        len: u64,
        pages: Option<Pages>,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        static ZEROES: [u8; PIECE as usize] = [0; PIECE as usize];
        self.waiting.insert(offset, (len, pages));
        while let Some((len, pages)) = self.waiting.remove(&self.at) {
            let bytes = pages.as_ref().map_or(&ZEROES[..], Pages::bytes);
            self.output
                .write_all(&bytes[..len as usize])
                .map_err(told)?;
            self.at += len;
            progress.add(len);
        }
        Ok(())
    }
}
