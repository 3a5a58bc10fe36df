//! Standard input, standard output, and other files that cannot seek, as sources and targets.

use crate::error::{Error, io_error, usage};
use fathom_core::is_zero;
use rustix::fs::{Mode, OFlags, open};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Name of standard input and standard output as a source or target.
pub(crate) const NAME: &str = "-";
/// Display names of standard input and standard output.
pub(crate) const INPUT: &str = "standard input";
pub(crate) const OUTPUT: &str = "standard output";

/// Display name of any stream that is written to.
pub(crate) const ANY: &str = "a stream";

/// Directory for the copy of piped input: image formats need to seek, and the copy may be large.
const SPOOL: &str = "/var/tmp";

/// Returns standard input as a seekable file: either itself, or an unnamed copy of it.
pub(crate) fn standard_input() -> Result<File, Error> {
    let path = Path::new(INPUT);
    let input = io::stdin();
    let own = File::open("/proc/self/fd/0").map_err(io_error(path, "cannot open the file"))?;
    let is_file = own.metadata().is_ok_and(|m| m.is_file());
    if is_file {
        return Ok(own);
    }
    drop(own);
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let spool = open(SPOOL, flags, Mode::RUSR | Mode::WUSR);
    let spool = spool.map_err(|e| {
        io_error(Path::new(SPOOL), "cannot store a copy of standard input")(e.into())
    })?;
    spooled(&mut input.lock(), spool.into())
        .map_err(io_error(path, "cannot store a copy of the input"))
}

/// Returns standard output as a file. This avoids the line buffering of [`io::Stdout`].
pub(crate) fn standard_output() -> Result<File, Error> {
    let output = io::stdout().as_fd().try_clone_to_owned();
    let output = output.map_err(io_error(
        Path::new(OUTPUT),
        "cannot duplicate the file descriptor",
    ))?;
    Ok(output.into())
}

/// Opens a pipe, or another target that accepts bytes only in sequence.
pub(crate) fn open_target(target: &OsStr) -> Result<File, Error> {
    let path = Path::new(target);
    let file = File::options().write(true).open(path);
    let file = file.map_err(io_error(path, "cannot open the file"))?;
    let kind = file
        .metadata()
        .map_err(io_error(path, "cannot read the file's attributes"))?;
    if kind.is_file() || kind.file_type().is_block_device() {
        let problem = "a file or device, which needs no --to-stream; omit it, or write '-' and redirect \
             standard output";
        return Err(usage(path, problem));
    }
    Ok(file)
}

/// Copies all of `input` to `spool`, leaving holes for blocks of zeroes.
fn spooled(input: &mut impl Read, mut spool: File) -> io::Result<File> {
    let mut block = vec![0; 64 << 10];
    let mut len = 0;
    loop {
        let mut filled = 0;
        while filled < block.len() {
            match input.read(&mut block[filled..])? {
                0 => break,
                n => filled += n,
            }
        }
        let bytes = &block[..filled];
        match is_zero(bytes) {
            true => drop(spool.seek(SeekFrom::Current(filled as i64))?),
            false => spool.write_all(bytes)?,
        }
        len += filled as u64;
        if filled < block.len() {
            spool.set_len(len)?;
            return Ok(spool);
        }
    }
}
