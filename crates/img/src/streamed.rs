//! Writes a disk as a stream of bytes to standard output or to another target that cannot seek.

use crate::error::{Error, io_error, of, usage};
use crate::job::{Segment, State};
use crate::progress::Progress;
use crate::sink::{TargetOptions, size_for};
use crate::source::Opened;
use crate::stream;
use fathom_core::{AlignedBuffer, Op};
use fathom_formats::Format;
use fathom_formats::offline::create::Contents;
use fathom_stack::{DiskReply, DiskRequest, Job};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Size of a request in bytes, and maximum number of concurrent requests.
const PIECE: u64 = 512 << 10;
const DEPTH: usize = 16;
/// Bytes of the source to mark in the tables between two checks for cancellation; a multiple of the
/// cluster size.
const MARKED: u64 = 64 << 20;
/// Maximum sleep between two checks for cancellation.
const TICK: Duration = Duration::from_millis(100);

static ZEROES: [u8; PIECE as usize] = [0; PIECE as usize];

/// Writes the concatenated disks as an image, from its first to its last byte.
pub(crate) fn convert_to_stream(
    job: &Job,
    sources: &[Opened],
    target: &OsStr,
    options: &TargetOptions,
    rate: Option<u64>,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let mut output = Output::open(target, rate)?;
    match (options.create.format, sources) {
        (Format::Qcow2, [source]) => qcow2(job, source, options, &mut output, progress)?,
        _ => {
            progress.begin(sources.iter().map(Opened::size).sum());
            for source in sources {
                let mut segments = source.segments(job, usize::MAX)?;
                output.copy(job, source, &mut segments, progress)?;
            }
        }
    }
    output.end()?;
    progress.end();
    Ok(())
}

/// Writes a qcow2 image. The source's map determines which clusters contain data.
fn qcow2(
    job: &Job,
    source: &Opened,
    options: &TargetOptions,
    output: &mut Output,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let create = &options.create;
    let told = of(Path::new(stream::ANY));
    let size = size_for(create, source.size(), Path::new(stream::ANY))?;
    if options.has_backing() && size > source.size() {
        let problem = "has the source's size if it has a backing file; omit -o size or -B";
        return Err(usage(Path::new(stream::ANY), problem));
    }
    let mut contents = Contents::new(create, size).map_err(&told)?;
    let layers = match options.has_backing() {
        true => 1,
        false => usize::MAX,
    };
    for segment in source.segments(job, layers)? {
        let Segment { range, state } = segment?;
        let mut left = range.start - source.start()..range.end - source.start();
        while !left.is_empty() {
            let end = left.end.min((left.start + 1).next_multiple_of(MARKED));
            let range = left.start..end;
            let added = match state {
                State::Data => contents.add_data(range),
                State::Zero | State::Hole => contents.add_zeroes(range),
                State::Below => Ok(()),
            };
            added.map_err(&told)?;
            progress.check()?;
            left.start = end;
        }
    }
    let data = || contents.data();
    progress.begin(data().map(|range| range.end - range.start).sum());
    let put = contents.put_metadata(create, &mut |bytes| output.put_bytes(bytes));
    put.map_err(of(&output.path))?;
    let mut segments = data().map(|range| {
        Ok(Segment {
            range: range.start + source.start()..range.end.min(source.size()) + source.start(),
            state: State::Data,
        })
    });
    output.copy(job, source, &mut segments, progress)?;
    output.fill(contents.cluster_size())
}

/// The output stream, with the data that is read but cannot be written yet.
struct Output {
    path: PathBuf,
    to: BufWriter<File>,
    written: u64,
    /// Number of pieces whose reads were started, and number of pieces written.
    begun: u64,
    done: u64,
    /// Pieces that wait for earlier ones, by number: length, and data. `None` stands for zeroes.
    waiting: BTreeMap<u64, (u64, Option<AlignedBuffer>)>,
    pace: Pace,
}

/// Limits the transfer rate.
struct Pace {
    rate: Option<u64>,
    started: Instant,
    bytes: u64,
}

impl Pace {
    /// Waits until the rate limit permits the next `bytes` bytes.
    fn wait(&mut self, bytes: u64, progress: &Progress<'_>) -> Result<(), Error> {
        let Some(rate) = self.rate else {
            return Ok(());
        };
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        self.bytes += bytes;
        loop {
            progress.check()?;
            let left = due.saturating_sub(self.started.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(TICK));
        }
    }
}

impl Output {
    fn open(target: &OsStr, rate: Option<u64>) -> Result<Output, Error> {
        let (path, to) = match target == stream::NAME {
            true => (stream::OUTPUT.into(), stream::standard_output()?),
            false => (PathBuf::from(target), stream::open_target(target)?),
        };
        Ok(Output {
            path,
            to: BufWriter::new(to),
            written: 0,
            begun: 0,
            done: 0,
            waiting: BTreeMap::new(),
            pace: Pace {
                rate,
                started: Instant::now(),
                bytes: 0,
            },
        })
    }

    fn put_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let put = self.put_bytes(bytes);
        put.map_err(io_error(&self.path, "cannot write"))
    }

    /// Writes the contents of the segments of a source, without the gaps between them.
    fn copy(
        &mut self,
        job: &Job,
        source: &Opened,
        segments: &mut dyn Iterator<Item = Result<Segment, Error>>,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        let mut in_flight = 0;
        let mut outcome = self.begin(job, source, segments, &mut in_flight, progress);
        for _ in 0..in_flight {
            // Wait for every reply, even after an error, so that the buffers are returned.
            let answer = job.wait();
            outcome = outcome.and_then(|()| self.take(answer, source, progress));
        }
        outcome
    }

    fn begin(
        &mut self,
        job: &Job,
        source: &Opened,
        segments: &mut dyn Iterator<Item = Result<Segment, Error>>,
        in_flight: &mut usize,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        for segment in segments {
            let Segment { range, state } = segment?;
            let mut at = range.start;
            while at < range.end {
                let len = (range.end - at).min(PIECE);
                self.pace.wait(len, progress)?;
                let number = self.begun;
                self.begun += 1;
                if state == State::Data {
                    let pages = AlignedBuffer::try_new(PIECE as usize).map_err(Error::memory)?;
                    source.client.ask(DiskRequest {
                        tag: number,
                        ..DiskRequest::new(Op::Read, at, len, Some(pages))
                    });
                    *in_flight += 1;
                } else {
                    self.put(number, len, None, progress)?;
                }
                at += len;
                let is_full = |output: &Output, in_flight: usize| {
                    in_flight > 0 && (in_flight >= DEPTH || output.waiting.len() >= DEPTH)
                };
                while is_full(self, *in_flight) {
                    *in_flight -= 1;
                    self.take(job.wait(), source, progress)?;
                }
                progress.check()?;
            }
        }
        Ok(())
    }

    fn take(
        &mut self,
        answer: DiskReply,
        source: &Opened,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        let (ask, errno) = (answer.ask, answer.errno);
        if errno != 0 {
            let (at, len) = (ask.offset, ask.len);
            return Err(Error::data(&source.path, "read", at, len, errno));
        }
        self.put(ask.tag, ask.len, ask.pages, progress)
    }

    /// Queues a piece, and writes all pieces whose predecessors have been written.
    fn put(
        &mut self,
        number: u64,
        len: u64,
        pages: Option<AlignedBuffer>,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        self.waiting.insert(number, (len, pages));
        while let Some((len, pages)) = self.waiting.remove(&self.done) {
            let bytes = pages.as_ref().map_or(&ZEROES[..], AlignedBuffer::bytes);
            self.write(&bytes[..len as usize])?;
            self.done += 1;
            progress.add(len);
        }
        Ok(())
    }

    /// Writes zeroes up to a multiple of `unit`.
    fn fill(&mut self, unit: u64) -> Result<(), Error> {
        let mut left = self.written.next_multiple_of(unit) - self.written;
        while left > 0 {
            let len = left.min(PIECE);
            self.write(&ZEROES[..len as usize])?;
            left -= len;
        }
        Ok(())
    }

    fn end(mut self) -> Result<(), Error> {
        let told = io_error(&self.path, "cannot write");
        self.to.flush().map_err(told)
    }
}
