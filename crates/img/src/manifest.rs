//! `fathom img manifest`

use crate::archive::{StripeOptions, with_hashes};
use crate::background::Background;
use crate::error::{Error, io_error, usage};
use crate::progress::Progress;
use crate::source::{Opened, Source};
use crate::stripes::{Keep, read};
use crate::target::parent;
use fathom_archive::Manifest;
use fathom_formats::Format;
use fathom_formats::served::Storage;
use fathom_stack::Job;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a manifest of a disk's contents to a file and returns it. A reader uses the manifest to
/// verify data from untrusted storage.
pub fn manifest(
    source: &Source,
    file: &Path,
    options: &StripeOptions,
    progress: &mut Progress<'_>,
) -> Result<Manifest, Error> {
    refuse_taken(file, options.force)?;
    let mut job = Job::default();
    let source = source.open(&mut job)?;
    let frame = options.frame(&source.path, size_of(&source)?)?;
    let background = Background::new()?;
    let striped = read(&job, &source, &frame, Keep::Hashes, &background, progress)?;
    progress.check()?;
    let manifest = with_hashes(&frame, striped.hashes);
    let written = write(file, &manifest.to_bytes(), options.force);
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => taken(file),
        _ => io_error(file, "cannot write the file")(error),
    })?;
    Ok(manifest)
}

/// Returns the size of the disk in bytes. For a raw file, this is the exact file length, which need
/// not be a multiple of a sector.
fn size_of(source: &Opened) -> Result<u64, Error> {
    let Some((image, Format::Raw)) = source.image() else {
        return Ok(source.size());
    };
    let len = image.bytes().len();
    let len = len.map_err(io_error(image.path(), "cannot read the image"))?;
    Ok(len.min(source.size()))
}

fn refuse_taken(file: &Path, force: bool) -> Result<(), Error> {
    match file.symlink_metadata() {
        Ok(_) if !force => Err(taken(file)),
        _ => Ok(()),
    }
}

fn taken(file: &Path) -> Error {
    let problem = "already exists; choose another name, or replace it with --force";
    usage(file, problem)
}

/// Writes a file atomically: the name never refers to an incomplete file.
fn write(path: &Path, bytes: &[u8], force: bool) -> io::Result<()> {
    let part = Part(part_of(path));
    let mut file = File::create(&part.0)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    // Unlike a rename, a hard link never replaces a file. Some file systems do not support hard
    // links.
    let linked = match force {
        true => Ok(false),
        false => fs::hard_link(&part.0, path).map(|()| true),
    };
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
        Ok(true) => {}
        _ => fs::rename(&part.0, path)?,
    }
    File::open(parent(path))?.sync_all()
}

/// A temporary file that is removed on drop.
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    name.into()
}
