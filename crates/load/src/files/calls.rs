//! Performs the system calls of each operation.

use std::fmt::Write;
use std::os::fd::OwnedFd;

use rustix::fs::{Advice, AtFlags, Mode, OFlags, fadvise, fsync, openat, unlinkat};
use rustix::io::{Errno, pread, retry_on_intr, write};

use super::contents::{self, Memory, Place};
use super::mail::Kind;
use super::model::{File, Step};
use super::options::{Options, SECTOR};
use super::tree::Tree;
use crate::error::{Error, Result};
use crate::workload::Rng;

/// Size in bytes of transfers that are not measured.
const CHUNK: u32 = 256 << 10;

/// Amount of data that an operation has transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of block reads or writes. An operation without transfers counts as one.
    pub ios: u64,
    pub bytes: u64,
}

/// Performs the operations of one thread.
#[derive(Debug)]
pub struct Calls<'a> {
    options: &'a Options,
    tree: &'a Tree,
    /// Data to write.
    data: Memory,
    /// Data that was read.
    found: Memory,
    name: String,
    /// Number of creates and appends until the next fsync.
    until_fsync: u32,
    /// Number of sectors that were read and had the expected contents.
    pub checked: u64,
    /// Number of sectors written with verifiable contents.
    pub written: u64,
}

impl<'a> Calls<'a> {
    pub fn new(options: &'a Options, tree: &'a Tree, thread: u16) -> Calls<'a> {
        let len = options.bs.max(CHUNK) as usize;
        Calls {
            options,
            tree,
            data: Memory::new(len, options.seed ^ u64::from(thread)),
            found: Memory::new(len, 0),
            name: String::with_capacity(32),
            until_fsync: options.fsync,
            checked: 0,
            written: 0,
        }
    }

    /// Performs an operation.
    #[inline]
    pub fn perform(&mut self, step: &Step) -> Result<Moved> {
        let bs = self.options.bs;
        let nothing = Moved { ios: 1, bytes: 0 };
        match step.kind {
            Kind::Create => self.create(step.file, bs, true),
            Kind::Append => self.append(step.file, step.from),
            Kind::Read => self.read(step.file, step.seed),
            Kind::Open => self.open(step.file, OFlags::RDONLY).map(|_| nothing),
            Kind::Delete => self.delete(step.file).map(|()| nothing),
        }
    }

    /// Creates a file that exists before the load.
    pub fn prepare(&mut self, file: File) -> Result<Moved> {
        self.create(file, CHUNK, false)
    }

    fn create(&mut self, file: File, chunk: u32, counts: bool) -> Result<Moved> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let fd = self.open(file, flags)?;
        let moved = self.write(&fd, file, 0, chunk)?;
        if counts {
            self.sync(&fd, file)?;
        }
        Ok(moved)
    }

    fn append(&mut self, file: File, from: u32) -> Result<Moved> {
        let fd = self.open(file, OFlags::WRONLY | OFlags::APPEND)?;
        let moved = self.write(&fd, file, from, self.options.bs)?;
        self.sync(&fd, file)?;
        Ok(moved)
    }

    fn read(&mut self, file: File, seed: u64) -> Result<Moved> {
        let fd = self.open(file, OFlags::RDONLY)?;
        let (bs, size) = (self.options.bs, file.size);
        let blocks = size.div_ceil(bs);
        let mut rng = Rng::new(seed);
        let mut bytes = 0;
        for _ in 0..blocks {
            let from = rng.below(blocks.into()) as u32 * bs;
            let len = bs.min(size - from);
            self.read_block(&fd, file, from, len)?;
            bytes += u64::from(len);
        }
        Ok(Moved {
            ios: blocks.into(),
            bytes,
        })
    }

    fn delete(&mut self, file: File) -> Result<()> {
        self.set_name(file);
        unlinkat(self.tree.dir(file.dir), &*self.name, AtFlags::empty())
            .map_err(|e| self.failed("removing", file, e))
    }

    /// Reads all of a file, and returns an error if its contents or size are wrong. The file must
    /// have been written back, so that its data can be read from the disk instead of the page
    /// cache.
    pub fn check(&mut self, file: File) -> Result<()> {
        let fd = self.open(file, OFlags::RDONLY)?;
        if !self.options.direct {
            fadvise(&fd, 0, None, Advice::DontNeed)
                .map_err(|e| self.failed("dropping from the page cache", file, e))?;
        }
        for from in (0..file.size).step_by(CHUNK as usize) {
            self.read_block(&fd, file, from, CHUNK.min(file.size - from))?;
        }
        let beyond = &mut self.found.get()[..self.tree.align() as usize];
        match retry_on_intr(|| pread(&fd, &mut *beyond, file.size.into())) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.wrong_size(file, "more")),
            Err(e) => Err(self.failed("reading", file, e)),
        }
    }

    fn set_name(&mut self, file: File) {
        self.name.clear();
        // Writing to a string cannot fail.
        let _ = write!(self.name, "f{:08}", file.id);
    }

    fn open(&mut self, file: File, flags: OFlags) -> Result<OwnedFd> {
        self.set_name(file);
        let mut flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        flags.set(OFlags::DIRECT, self.options.direct);
        let (dir, mode) = (self.tree.dir(file.dir), Mode::RUSR | Mode::WUSR);
        retry_on_intr(|| openat(dir, &*self.name, flags, mode))
            .map_err(|e| self.failed("opening", file, e))
    }

    /// Writes a file from byte `from` to its end, at the current file position.
    fn write(&mut self, fd: &OwnedFd, file: File, from: u32, chunk: u32) -> Result<Moved> {
        let mut moved = Moved::default();
        for at in (from..file.size).step_by(chunk as usize) {
            let len = chunk.min(file.size - at);
            if self.options.verify {
                let place = self.place(file, at);
                contents::fill(&mut self.data.get()[..len as usize], place);
                self.written += u64::from(len / SECTOR);
            }
            let mut rest = &self.data.get()[..len as usize];
            while !rest.is_empty() {
                match retry_on_intr(|| write(fd, rest)) {
                    Ok(0) => return Err(self.failed("writing", file, Errno::NOSPC)),
                    Ok(done) => rest = &rest[done..],
                    Err(e) => return Err(self.failed("writing", file, e)),
                }
            }
            moved.ios += 1;
            moved.bytes += u64::from(len);
        }
        Ok(moved)
    }

    fn read_block(&mut self, fd: &OwnedFd, file: File, from: u32, len: u32) -> Result<()> {
        if self.options.verify {
            contents::mark_unread(&mut self.found.get()[..len as usize]);
        }
        let mut done = 0;
        while done < len as usize {
            let rest = &mut self.found.get()[done..len as usize];
            match retry_on_intr(|| pread(fd, &mut *rest, u64::from(from) + done as u64)) {
                Ok(0) => return Err(self.wrong_size(file, "fewer")),
                Ok(n) => done += n,
                Err(e) => return Err(self.failed("reading", file, e)),
            }
        }
        if !self.options.verify {
            return Ok(());
        }
        let place = self.place(file, from);
        match contents::find_wrong(&self.found.get()[..len as usize], place) {
            None => self.checked += u64::from(len / SECTOR),
            Some((offset, found)) => {
                return Err(Error::Contents {
                    path: self.tree.path_of(file),
                    offset,
                    found,
                });
            }
        }
        Ok(())
    }

    fn sync(&mut self, fd: &OwnedFd, file: File) -> Result<()> {
        if self.options.fsync == 0 {
            return Ok(());
        }
        self.until_fsync -= 1;
        if self.until_fsync > 0 {
            return Ok(());
        }
        self.until_fsync = self.options.fsync;
        retry_on_intr(|| fsync(fd)).map_err(|e| self.failed("syncing", file, e))
    }

    fn place(&self, file: File, offset: u32) -> Place {
        Place {
            seed: self.options.seed,
            file: file.id,
            offset: offset.into(),
        }
    }

    #[cold]
    fn failed(&self, doing: &str, file: File, cause: Errno) -> Error {
        let path = self.tree.path_of(file);
        let changed = |how: &str| Error::Changed(format!("{} {how}", path.display()));
        match cause {
            Errno::NOENT => changed("does not exist any more: another program has removed it"),
            Errno::EXIST => changed("exists already: another program has created it"),
            e => self
                .tree
                .failed(format_args!("{doing} {}", path.display()), e),
        }
    }

    #[cold]
    fn wrong_size(&self, file: File, found: &str) -> Error {
        let path = self.tree.path_of(file);
        Error::Changed(format!(
            "{} has {found} bytes than the {} that were written: another program has changed it",
            path.display(),
            file.size
        ))
    }
}
