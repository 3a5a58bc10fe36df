//! Handles the kernel's requests for the file.

use super::state::Shared;
use super::task::{MAX_LEN, Task, Then, Wanted};
use fathom_core::{DiskInfo, Op};
use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    INodeNo, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyLseek, ReplyOpen, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Maximum number of asynchronous requests that the kernel sends before it gets replies.
const BACKGROUND: u16 = 64;

/// Time for which the kernel may keep attributes: the disk's size can change at any time.
const TTL: Duration = Duration::ZERO;

/// Block size of stat(2) in bytes.
const BLKSIZE: u32 = 4096;

/// The only inode of the mount, a regular file.
pub(super) struct File {
    shared: Arc<Shared>,
    is_writable: bool,
    owner: (u32, u32),
    /// When the file was mounted or last written to through the mount.
    changed: Mutex<SystemTime>,
}

impl File {
    pub(super) fn new(shared: Arc<Shared>, is_writable: bool) -> File {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        File {
            shared,
            is_writable,
            owner: (uid.as_raw(), gid.as_raw()),
            changed: Mutex::new(SystemTime::now()),
        }
    }

    fn info(&self) -> DiskInfo {
        self.shared.disk().info()
    }

    fn attributes(&self) -> FileAttr {
        let size = self.info().size;
        let changed = *self.changed.lock();
        FileAttr {
            ino: INodeNo::ROOT,
            size,
            // Programs such as cp(1) look for holes only if the file seems to have some. With 0
            // blocks, tar(1) would not even look for data.
            blocks: (size / 512).saturating_sub(1).max(1),
            atime: changed,
            mtime: changed,
            ctime: changed,
            crtime: changed,
            kind: FileType::RegularFile,
            perm: if self.is_writable { 0o600 } else { 0o400 },
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: BLKSIZE,
            flags: 0,
        }
    }

    /// Submits a request of any kind. `then` gets `None` if the session ends.
    fn submit(&self, handle: FileHandle, range: (u64, u64), then: Then) {
        let Some(buffer) = self.shared.buffer() else {
            return then.fail(Errno::ENODEV);
        };
        let op = match &then {
            Then::Read(_) => Op::Read,
            Then::Write(_) => Op::Write,
            Then::Flush(_) => Op::Flush,
            Then::Zero { .. } => Op::WriteZeroes,
            Then::Seek { .. } => Op::BlockStatus,
        };
        let task = Task {
            op,
            offset: range.0,
            len: range.1,
            unmap: false,
            buffer,
            then,
        };
        self.shared.submit(handle.into(), task);
    }

    fn flush(&self, handle: FileHandle, reply: ReplyEmpty) {
        match self.is_writable {
            true => self.submit(handle, (0, 0), Then::Flush(reply)),
            false => reply.ok(),
        }
    }
}

impl Filesystem for File {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // (An error is the nearest possible value.)
        if let Err(nearest) = config.set_max_write(MAX_LEN as u32) {
            let _ = config.set_max_write(nearest);
        }
        let _ = config.set_max_background(BACKGROUND);
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes());
    }

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let attributes = self.attributes();
        let is_other_size = size.is_some_and(|size| size != attributes.size);
        // The owner, the mode, the times and the size are the server's.
        match is_other_size || mode.or(uid).or(gid).is_some() || size.is_none() {
            true => reply.error(Errno::EOPNOTSUPP),
            false => reply.attr(&TTL, &attributes),
        }
    }

    fn open(&self, request: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // The page cache would not notice changes by guests and NBD clients.
        let direct = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        let answers = match flags.acc_mode() {
            // Only a handle that can write needs a flush at its end.
            OpenAccMode::O_RDONLY => direct | FopenFlags::FOPEN_NOFLUSH,
            OpenAccMode::O_WRONLY | OpenAccMode::O_RDWR => direct,
        };
        match self.shared.open(format!("process {}", request.pid())) {
            Ok(handle) => reply.opened(FileHandle(handle), answers),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let left = self.info().size.saturating_sub(offset);
        match u64::from(size).min(left).min(MAX_LEN as u64) {
            0 => reply.data(&[]),
            len => self.submit(handle, (offset, len), Then::Read(reply)),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if !self.is_writable {
            return reply.error(Errno::EROFS);
        }
        let left = self.info().size.saturating_sub(offset);
        let len = (data.len() as u64).min(left).min(MAX_LEN as u64);
        if len == 0 && !data.is_empty() {
            return reply.error(Errno::ENOSPC);
        }
        let Some(mut buffer) = self.shared.buffer() else {
            return reply.error(Errno::ENODEV);
        };
        buffer.bytes_mut()[..len as usize].copy_from_slice(&data[..len as usize]);
        *self.changed.lock() = SystemTime::now();
        let task = Task {
            op: Op::Write,
            offset,
            len,
            unmap: false,
            buffer,
            then: Then::Write(reply),
        };
        self.shared.submit(handle.into(), task);
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.flush(handle, reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        self.flush(handle, reply);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.shared.close(handle.into());
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let info = self.info();
        match zeroes(&info, (offset, length), mode) {
            Err(errno) => reply.error(errno),
            Ok(_) if !self.is_writable => reply.error(Errno::EROFS),
            Ok(Zeroes { end, .. }) if end <= offset => reply.ok(),
            Ok(Zeroes { end, unmap, piece }) => {
                let Some(buffer) = self.shared.buffer() else {
                    return reply.error(Errno::ENODEV);
                };
                *self.changed.lock() = SystemTime::now();
                let len = piece.min(end - offset);
                let rest = offset + len..end;
                let task = Task {
                    op: Op::WriteZeroes,
                    offset,
                    len,
                    unmap,
                    buffer,
                    then: Then::Zero { reply, rest, piece },
                };
                self.shared.submit(handle.into(), task);
            }
        }
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let end = self.info().size;
        let wanted = match whence {
            libc::SEEK_DATA => Wanted::Data,
            libc::SEEK_HOLE => Wanted::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        match u64::try_from(offset) {
            Ok(offset) if offset < end => {
                let range = (offset, end - offset);
                self.submit(handle, range, Then::Seek { reply, wanted, end });
            }
            _ => reply.error(Errno::ENXIO),
        }
    }

    // The kernel does not ask again for these.

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}

/// How a range is zeroed.
#[derive(Debug, PartialEq, Eq)]
struct Zeroes {
    end: u64,
    unmap: bool,
    /// Maximum length of one request in bytes.
    piece: u64,
}

/// Converts a mode of fallocate(2): punching holes and zeroing ranges are possible, and the file
/// does not grow.
fn zeroes(info: &DiskInfo, (offset, len): (u64, u64), mode: i32) -> Result<Zeroes, Errno> {
    let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
    let unmap = match mode & !libc::FALLOC_FL_KEEP_SIZE {
        libc::FALLOC_FL_PUNCH_HOLE => info.discard.is_some(),
        libc::FALLOC_FL_ZERO_RANGE => false,
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let limits = info.write_zeroes.ok_or(Errno::EOPNOTSUPP)?;
    let end = offset.checked_add(len).ok_or(Errno::EFBIG)?;
    if end > info.size && !keeps_size {
        return Err(Errno::ENOSPC);
    }
    Ok(Zeroes {
        end: end.min(info.size),
        unmap,
        piece: (limits.max_len & !511).max(512),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_core::RangeLimits;

    #[test]
    fn ranges_are_zeroed_within_the_disk() {
        let limits = RangeLimits {
            alignment: 512,
            max_len: 1000,
        };
        let info = DiskInfo {
            size: 4096,
            block_size: 512,
            physical_block_size: 512,
            optimal_io_size: 0,
            read_only: false,
            write_cache: true,
            discard: Some(limits),
            write_zeroes: Some(limits),
        };
        let (keep, punch) = (libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_PUNCH_HOLE);
        let punched = zeroes(&info, (4000, 1000), punch | keep).unwrap();
        let expected = Zeroes {
            end: 4096,
            unmap: true,
            piece: 512,
        };
        assert_eq!(punched, expected);
        let zero = libc::FALLOC_FL_ZERO_RANGE;
        assert!(!zeroes(&info, (0, 4096), zero).unwrap().unmap);
        assert_eq!(zeroes(&info, (0, 4097), zero), Err(Errno::ENOSPC));
        for allocation in [0, keep] {
            assert_eq!(zeroes(&info, (0, 1), allocation), Err(Errno::EOPNOTSUPP));
        }
        let without = DiskInfo {
            write_zeroes: None,
            ..info
        };
        assert_eq!(zeroes(&without, (0, 1), zero), Err(Errno::EOPNOTSUPP));
    }
}
