//! Standard input and output, and other things that cannot seek, as images.

use crate::error::{Error, io_error, usage};
use fathom_core::is_zero;
use rustix::fs::{Mode, OFlags, open};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Its name, and that of standard output.
pub(crate) const NAME: &str = "-";
/// Standard input and standard output, for people.
pub(crate) const INPUT: &str = "standard input";
pub(crate) const OUTPUT: &str = "standard output";

/// Any of these that is written to, for people.
pub(crate) const ANY: &str = "a stream";

/// Where what comes in by a pipe is kept: formats need to seek, and it may be large.
const SPOOL: &str = "/var/tmp";

/// Standard input as a file that can be read anywhere: itself, or a copy without a name.
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

/// Standard output, whose own buffer looks for the ends of lines.
pub(crate) fn standard_output() -> Result<File, Error> {
    let output = io::stdout().as_fd().try_clone_to_owned();
    let output = output.map_err(io_error(
        Path::new(OUTPUT),
        "cannot duplicate the file descriptor",
    ))?;
    Ok(output.into())
}

/// A pipe or whatever else takes bytes one after the other.
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

/// All that `input` has, with holes for zeroes.
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
