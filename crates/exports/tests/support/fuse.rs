//! A FUSE file system that stops replying on request.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

// linux/fuse.h
const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const INIT: u32 = 26;
const ENOSYS: i32 = 38;

const SIZE: u64 = super::guest::MEMORY_SIZE;

/// A mounted file system. Drop unmounts it and ends all waits for it.
pub struct Fuse {
    dir: tempfile::TempDir,
    silent: Arc<AtomicBool>,
    asked: Arc<AtomicBool>,
}

impl Fuse {
    pub fn mount() -> Fuse {
        let dir = tempfile::tempdir().unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.expect("/dev/fuse, as root");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        let c_string = |text: &str| CString::new(text).unwrap();
        let (target, options) = (c_string(dir.path().to_str().unwrap()), c_string(&options));
        let name = c_string("fuse");
        // SAFETY: these strings end in NUL, as mount(2) requires for FUSE.
        let mounted = unsafe {
            let data = options.as_ptr().cast();
            libc::mount(name.as_ptr(), target.as_ptr(), name.as_ptr(), 0, data)
        };
        let error = std::io::Error::last_os_error();
        assert_eq!(mounted, 0, "mounting needs root: {error}");
        let fuse = Fuse {
            dir,
            silent: Arc::default(),
            asked: Arc::default(),
        };
        let (silent, asked) = (fuse.silent.clone(), fuse.asked.clone());
        std::thread::spawn(move || serve(device, &silent, &asked));
        fuse
    }

    /// Opens a file of the size of a guest's memory.
    pub fn open(&self) -> File {
        let path = self.dir.path().join("memory");
        File::options().read(true).write(true).open(path).unwrap()
    }

    /// Stops replying to requests.
    pub fn fall_silent(&self) {
        self.silent.store(true, SeqCst);
    }

    /// Returns true if a request has arrived since [`Fuse::fall_silent`].
    pub fn was_asked(&self) -> bool {
        self.asked.load(SeqCst)
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let target = CString::new(self.dir.path().to_str().unwrap()).unwrap();
        // SAFETY: the string ends in NUL.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
    }
}

fn serve(mut device: File, silent: &AtomicBool, asked: &AtomicBool) {
    let mut message = vec![0; 1 << 20];
    while let Ok(n) = device.read(&mut message) {
        let word = |at: usize| u32::from_ne_bytes(message[at..at + 4].try_into().unwrap());
        assert!(n >= 40);
        if silent.load(SeqCst) {
            asked.store(true, SeqCst);
            continue;
        }
        let (opcode, unique) = (word(4), &message[8..16]);
        let node = word(16);
        let (error, body) = match opcode {
            INIT => (0, init(word(40), word(44))),
            LOOKUP => (0, entry()),
            GETATTR => (0, [&[0; 16][..], &attributes(node == 1)].concat()),
            OPEN => (0, vec![0; 16]),
            _ => (-ENOSYS, Vec::new()),
        };
        let mut answer = (16 + body.len() as u32).to_ne_bytes().to_vec();
        answer.extend_from_slice(&error.to_ne_bytes());
        answer.extend_from_slice(unique);
        answer.extend_from_slice(&body);
        // FORGET has no reply, and the kernel rejects one.
        let _ = device.write_all(&answer);
    }
}

/// Encodes a struct fuse_init_out.
fn init(major: u32, minor: u32) -> Vec<u8> {
    let mut body = vec![0; 64];
    body[..4].copy_from_slice(&major.to_ne_bytes());
    body[4..8].copy_from_slice(&minor.to_ne_bytes());
    body[20..24].copy_from_slice(&(1u32 << 16).to_ne_bytes()); // max_write
    body
}

/// Encodes a struct fuse_entry_out: node 2, valid for an hour.
fn entry() -> Vec<u8> {
    let mut body = vec![0; 40];
    body[..8].copy_from_slice(&2u64.to_ne_bytes());
    body[16..24].copy_from_slice(&3600u64.to_ne_bytes());
    body[24..32].copy_from_slice(&3600u64.to_ne_bytes());
    body.extend_from_slice(&attributes(false));
    body
}

/// Encodes a struct fuse_attr.
fn attributes(directory: bool) -> [u8; 88] {
    let mut attr = [0; 88];
    let (ino, mode): (u64, u32) = match directory {
        true => (1, 0o40_755),
        false => (2, 0o100_600),
    };
    attr[..8].copy_from_slice(&ino.to_ne_bytes());
    attr[8..16].copy_from_slice(&SIZE.to_ne_bytes());
    attr[60..64].copy_from_slice(&mode.to_ne_bytes());
    attr[64..68].copy_from_slice(&1u32.to_ne_bytes());
    attr
}
