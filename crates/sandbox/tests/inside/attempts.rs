//! The attempts of an attacker.

use io_uring::types::Fd;
use io_uring::{IoUring, opcode, squeue};
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Happened,
    /// The kernel refused the call with this errno.
    Refused(i32),
    /// The attempt ended the process.
    Killed,
}

impl Outcome {
    pub fn read(line: &str) -> Outcome {
        match line.parse() {
            Ok(errno) => Outcome::Refused(errno),
            Err(_) => Outcome::Happened,
        }
    }

    pub fn written(self) -> String {
        match self {
            Outcome::Refused(errno) => errno.to_string(),
            _ => "happened".into(),
        }
    }

    fn of(result: i64) -> Outcome {
        match result {
            0.. => Outcome::Happened,
            _ => {
                let error = std::io::Error::last_os_error();
                Outcome::Refused(error.raw_os_error().unwrap_or(libc::EIO))
            }
        }
    }
}

/// Resources that the attempts use.
pub struct Place {
    pub dir: PathBuf,
    port: u16,
    ring: Option<IoUring>,
}

impl Place {
    pub fn from_environment() -> Place {
        parent();
        Place {
            dir: std::env::var_os("CAGE_DIR").unwrap().into(),
            port: std::env::var("CAGE_PORT").unwrap().parse().unwrap(),
            ring: None,
        }
    }

    /// Creates an io_uring instance without the restrictions of the engine.
    pub fn with_ring(mut self) -> Place {
        self.ring = Some(IoUring::new(4).unwrap());
        self
    }

    fn path(&self, name: &str) -> CString {
        CString::new(self.dir.join(name).into_os_string().into_vec()).unwrap()
    }

    fn by_ring(&mut self, entry: squeue::Entry) -> Outcome {
        let ring = self.ring.as_mut().unwrap();
        // SAFETY: this function waits for the completion, so the entry's memory stays valid.
        unsafe { ring.submission().push(&entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        match ring.completion().next().unwrap().result() {
            result @ ..0 => Outcome::Refused(-result),
            _ => Outcome::Happened,
        }
    }
}

pub struct Attempt {
    pub name: &'static str,
    /// Whether the attempt succeeds without a sandbox.
    pub works: bool,
    /// Whether the attempt ends every sandboxed process, in any kind of thread.
    pub ends: bool,
    pub make: fn(&mut Place) -> Outcome,
}

/// Returns an attempt whose outcome depends on the thread.
const fn some(name: &'static str, make: fn(&mut Place) -> Outcome) -> Attempt {
    Attempt {
        name,
        works: true,
        ends: false,
        make,
    }
}

/// Returns an attempt that must always end a sandboxed process.
const fn never(name: &'static str, make: fn(&mut Place) -> Outcome) -> Attempt {
    Attempt {
        name,
        works: false,
        ends: true,
        make,
    }
}

fn call(number: i64, arguments: &[i64]) -> Outcome {
    let mut a = [0; 6];
    a[..arguments.len()].copy_from_slice(arguments);
    // SAFETY: pointers in the arguments are null, static or the callers'. No call frees or maps
    // memory in use.
    Outcome::of(unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]) })
}

fn open(path: &std::ffi::CStr, flags: i32) -> Outcome {
    let (at, path) = (libc::AT_FDCWD.into(), path.as_ptr() as i64);
    call(libc::SYS_openat, &[at, path, flags.into(), 0o600])
}

/// PID of the parent process, stored before the process enters the sandbox.
fn parent() -> i64 {
    static PARENT: OnceLock<u32> = OnceLock::new();
    i64::from(*PARENT.get_or_init(std::os::unix::process::parent_id))
}

fn own() -> i64 {
    std::process::id().into()
}

fn socket(family: i32, kind: i32) -> i64 {
    // SAFETY: the call uses no memory.
    unsafe { libc::syscall(libc::SYS_socket, family, kind, 0) }
}

fn tcp(call: i64, port: u16) -> Outcome {
    let socket = socket(libc::AF_INET, libc::SOCK_STREAM);
    if socket < 0 {
        return Outcome::of(socket);
    }
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes([127, 0, 0, 1]),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the call reads one address.
    Outcome::of(unsafe { libc::syscall(call, socket, &raw const address, 16) })
}

fn connect_unix(place: &mut Place) -> Outcome {
    let socket = socket(libc::AF_UNIX, libc::SOCK_STREAM);
    if socket < 0 {
        return Outcome::of(socket);
    }
    // SAFETY: a sockaddr_un of zeroes is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let path = place.path("socket");
    for (to, from) in address.sun_path.iter_mut().zip(path.as_bytes()) {
        *to = *from as _;
    }
    // SAFETY: the call reads one address.
    Outcome::of(unsafe { libc::syscall(libc::SYS_connect, socket, &raw const address, 110) })
}

fn map(protection: i32) -> Outcome {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    call(
        libc::SYS_mmap,
        &[0, 4096, protection.into(), flags.into(), -1, 0],
    )
}

fn make_executable(_: &mut Place) -> Outcome {
    let (protection, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the call creates a new mapping, which nothing else uses.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    call(libc::SYS_mprotect, &[memory as i64, 4096, all.into()])
}

fn make_ring(_: &mut Place) -> Outcome {
    let parameters = [0u64; 32];
    call(libc::SYS_io_uring_setup, &[4, parameters.as_ptr() as i64])
}

fn regain_capabilities(_: &mut Place) -> Outcome {
    // Capability version 3, and CAP_SYS_ADMIN in the effective and permitted sets.
    let header = [0x2008_0522u32, 0];
    let sets = [1u32 << 21, 1 << 21, 0, 0, 0, 0];
    let (header, sets) = (header.as_ptr() as i64, sets.as_ptr() as i64);
    call(libc::SYS_capset, &[header, sets])
}

fn become_another(_: &mut Place) -> Outcome {
    let path = c"/bin/echo".as_ptr();
    let arguments = [path, c"another program".as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null::<u8>()];
    let (arguments, environment) = (arguments.as_ptr() as i64, environment.as_ptr() as i64);
    call(libc::SYS_execve, &[path as i64, arguments, environment])
}

fn fork(_: &mut Place) -> Outcome {
    // SAFETY: without a new stack the call is fork(2), and the child exits at once.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        // SAFETY: the call uses no memory.
        0 => unsafe { libc::_exit(0) },
        result => Outcome::of(result),
    }
}

/// execve(2) by its number in the x32 ABI.
#[cfg(target_arch = "x86_64")]
const OTHER_NUMBER: i64 = 0x4000_0000 + 520;
#[cfg(not(target_arch = "x86_64"))]
const OTHER_NUMBER: i64 = libc::SYS_execveat;

pub const ATTEMPTS: [Attempt; 44] = [
    some("open shadow", |_| open(c"/etc/shadow", libc::O_RDONLY)),
    some("open a neighbour's image", |p| {
        open(&p.path("neighbour.img"), libc::O_RDWR)
    }),
    some("create a file", |p| {
        open(&p.path("new"), libc::O_RDWR | libc::O_CREAT)
    }),
    some("open another's memory", |_| {
        let path = CString::new(format!("/proc/{}/mem", parent())).unwrap();
        open(&path, libc::O_RDONLY)
    }),
    some("connect by TCP", |p| tcp(libc::SYS_connect, p.port)),
    some("bind a TCP port", |_| tcp(libc::SYS_bind, 0)),
    some("make a UDP socket", |_| {
        Outcome::of(socket(libc::AF_INET, libc::SOCK_DGRAM))
    }),
    some("connect to a Unix socket", connect_unix),
    some("make a ring", make_ring),
    some("open shadow by a ring", |p| {
        let entry = opcode::OpenAt::new(Fd(libc::AT_FDCWD), c"/etc/shadow".as_ptr());
        p.by_ring(entry.build())
    }),
    some("make a socket by a ring", |p| {
        let entry = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0);
        p.by_ring(entry.build())
    }),
    some("regain capabilities", regain_capabilities),
    never("look into another process", |_| {
        call(libc::SYS_process_vm_readv, &[parent(), 0, 0, 0, 0, 0])
    }),
    never("write into another process", |_| {
        call(libc::SYS_process_vm_writev, &[parent(), 0, 0, 0, 0, 0])
    }),
    never("trace", |_| {
        call(libc::SYS_ptrace, &[0x4206, parent(), 0, 0])
    }),
    never("signal another process", |_| {
        call(libc::SYS_kill, &[parent(), 0])
    }),
    never("signal itself as a process", |_| {
        call(libc::SYS_kill, &[own(), 0])
    }),
    never("hold another process", |_| {
        call(libc::SYS_pidfd_open, &[parent(), 0])
    }),
    never("take a descriptor", |_| {
        call(libc::SYS_pidfd_getfd, &[-1, 0, 0])
    }),
    never("make code in memory", |_| {
        map(libc::PROT_READ | libc::PROT_EXEC)
    }),
    never("make memory executable", make_executable),
    never("become root", |_| call(libc::SYS_setuid, &[0])),
    never("become root for good", |_| {
        call(libc::SYS_setresuid, &[0, 0, 0])
    }),
    never("join a group", |_| call(libc::SYS_setgroups, &[0, 0])),
    never("mount", |_| call(libc::SYS_mount, &[0, 0, 0, 0, 0])),
    never("mount anew", |_| call(libc::SYS_fsopen, &[0, 0])),
    never("open a tree", |_| call(libc::SYS_open_tree, &[-1, 0, 0])),
    never("change the root", |_| call(libc::SYS_chroot, &[0])),
    never("open by handle", |_| {
        call(libc::SYS_open_by_handle_at, &[-1, 0, 0])
    }),
    never("load a program into the kernel", |_| {
        call(libc::SYS_bpf, &[0, 0, 0])
    }),
    never("load a module", |_| {
        call(libc::SYS_finit_module, &[-1, 0, 0])
    }),
    never("get a user namespace", |_| {
        call(libc::SYS_unshare, &[libc::CLONE_NEWUSER.into()])
    }),
    never("join a namespace", |_| call(libc::SYS_setns, &[-1, 0])),
    never("handle page faults", |_| call(libc::SYS_userfaultfd, &[0])),
    never("read keys", |_| call(libc::SYS_keyctl, &[0, 0, 0, 0])),
    never("measure the kernel", |_| {
        call(libc::SYS_perf_event_open, &[0, 0, -1, -1, 0])
    }),
    never("change its personality", |_| {
        call(libc::SYS_personality, &[-1])
    }),
    never("fork", fork),
    never("share a segment", |_| {
        call(libc::SYS_shmget, &[0, 0, 0o600])
    }),
    never("make a device", |_| call(libc::SYS_mknodat, &[-1, 0, 0, 0])),
    never("set the clock", |_| call(libc::SYS_clock_settime, &[0, 0])),
    never("limit a file system", |_| {
        call(libc::SYS_quotactl, &[-1, 0, 0, 0])
    }),
    never("call by another number", |_| {
        call(OTHER_NUMBER, &[-1, 0, 0, 0, 0])
    }),
    // This attempt must be last, because nothing runs after it.
    Attempt {
        name: "become another program",
        works: true,
        ends: false,
        make: become_another,
    },
];
