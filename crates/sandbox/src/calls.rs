//! System calls that each kind of thread may make.
//!
//! The lists contain the calls that threads make in the test suite's scenarios. The lists also
//! contain calls that glibc and Rust's standard library make elsewhere.

use crate::program::{Calls, Test};
use libc::{
    SYS_accept4, SYS_brk, SYS_capset, SYS_clock_getres, SYS_clock_gettime, SYS_clock_nanosleep,
    SYS_clone, SYS_close, SYS_dup, SYS_dup3, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait,
    SYS_epoll_pwait2, SYS_eventfd2, SYS_exit, SYS_exit_group, SYS_faccessat, SYS_faccessat2,
    SYS_fadvise64, SYS_fallocate, SYS_fchmod, SYS_fchmodat, SYS_fchown, SYS_fchownat, SYS_fcntl,
    SYS_fdatasync, SYS_flock, SYS_fstat, SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex,
    SYS_getcpu, SYS_getcwd, SYS_getdents64, SYS_getegid, SYS_geteuid, SYS_getgid, SYS_getpeername,
    SYS_getpid, SYS_getppid, SYS_getrandom, SYS_getresgid, SYS_getresuid, SYS_getsockname,
    SYS_getsockopt, SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_io_cancel, SYS_io_destroy,
    SYS_io_getevents, SYS_io_setup, SYS_io_submit, SYS_io_uring_enter, SYS_io_uring_register,
    SYS_io_uring_setup, SYS_ioctl, SYS_landlock_restrict_self, SYS_lseek, SYS_madvise,
    SYS_membarrier, SYS_memfd_create, SYS_mincore, SYS_mkdirat, SYS_mlock, SYS_mmap, SYS_mprotect,
    SYS_mremap, SYS_msync, SYS_munmap, SYS_nanosleep, SYS_openat, SYS_openat2, SYS_pipe2,
    SYS_ppoll, SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_prlimit64, SYS_pwrite64,
    SYS_pwritev, SYS_pwritev2, SYS_read, SYS_readlinkat, SYS_readv, SYS_recvfrom, SYS_recvmsg,
    SYS_renameat2, SYS_restart_syscall, SYS_rseq, SYS_rt_sigaction, SYS_rt_sigprocmask,
    SYS_rt_sigreturn, SYS_sched_getaffinity, SYS_sched_setaffinity, SYS_sched_yield, SYS_seccomp,
    SYS_sendmsg, SYS_sendto, SYS_set_robust_list, SYS_setsockopt, SYS_shutdown, SYS_sigaltstack,
    SYS_statfs, SYS_statx, SYS_sync_file_range, SYS_sysinfo, SYS_tgkill, SYS_uname, SYS_unlinkat,
    SYS_write, SYS_writev,
};

const EXEC: u64 = libc::PROT_EXEC as u64;
const THREAD: u64 = (libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD) as u64;
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// prctl(2): names of memory mappings for /proc/PID/maps, and the auxiliary vector with the CPU's
/// features.
const PR_SET_VMA: u64 = 0x5356_4d41;
const PR_GET_AUXV: u64 = 0x4155_5856;

/// ioctl(2) requests on files and block devices, from linux/fs.h.
const IOCTLS: [u64; 8] = [
    0x1277,      // BLKDISCARD
    0x127f,      // BLKZEROOUT
    0x125e,      // BLKROGET
    0x1268,      // BLKSSZGET
    0x127b,      // BLKPBSZGET
    0x1279,      // BLKIOOPT
    0x8008_1272, // BLKGETSIZE64
    0x5421,      // FIONBIO
];

const FIONREAD: u64 = 0x541b;

/// Requested to find out whether standard error is a terminal.
const TCGETS: u64 = 0x5401;

/// fcntl(2) commands that change only descriptors of this process, and locks.
const FCNTLS: [i32; 9] = [
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

fn own_process() -> u64 {
    std::process::id().into()
}

/// Calls that every thread needs: memory without code, waiting, time, exit, new threads, and
/// sandboxing of new threads.
pub(crate) fn common() -> Calls {
    let prctls = [
        libc::PR_SET_NAME as u64,
        libc::PR_SET_TIMERSLACK as u64,
        libc::PR_SET_NO_NEW_PRIVS as u64,
        PR_SET_VMA,
        PR_GET_AUXV,
    ];
    let calls = Calls::default()
        // Memory that holds keys is locked.
        .any(&[SYS_brk, SYS_munmap, SYS_mremap, SYS_madvise, SYS_mlock])
        .any(&[SYS_futex, SYS_membarrier, SYS_restart_syscall])
        .any(&[SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_sigaction])
        .any(&[SYS_sigaltstack, SYS_rseq, SYS_set_robust_list])
        .any(&[SYS_exit, SYS_exit_group, SYS_gettid, SYS_getpid])
        .any(&[SYS_sched_yield, SYS_sched_getaffinity, SYS_getcpu])
        .any(&[SYS_sched_setaffinity])
        .any(&[SYS_clock_gettime, SYS_clock_getres, SYS_gettimeofday])
        .any(&[SYS_clock_nanosleep, SYS_nanosleep, SYS_getrandom])
        .any(&[SYS_read, SYS_write, SYS_writev, SYS_close, SYS_ppoll])
        .any(&[SYS_capset, SYS_landlock_restrict_self])
        .only(SYS_mmap, 2, Test::None(EXEC))
        .only(SYS_mprotect, 2, Test::None(EXEC))
        .if_all(
            SYS_clone,
            &[(0, Test::All(THREAD)), (0, Test::None(NAMESPACES))],
        )
        .one_of(SYS_prctl, 0, &prctls)
        .only(SYS_tgkill, 0, Test::Is(own_process()))
        .if_all(
            SYS_seccomp,
            &[
                (0, Test::Is(libc::SECCOMP_SET_MODE_FILTER.into())),
                // A thread may install a filter only for itself (no flags).
                (1, Test::Is(0)),
            ],
        )
        .one_of(SYS_fcntl, 1, &FCNTLS.map(|command| command as u64));
    #[cfg(target_arch = "x86_64")]
    let calls = calls.any(&[libc::SYS_poll, libc::SYS_time]);
    calls
}

/// I/O on open files.
fn file_io() -> Calls {
    Calls::default()
        .any(&[SYS_readv, SYS_pread64, SYS_preadv, SYS_preadv2])
        .any(&[SYS_pwrite64, SYS_pwritev, SYS_pwritev2])
        .any(&[SYS_fdatasync, SYS_fsync, SYS_sync_file_range])
        .any(&[SYS_fallocate, SYS_ftruncate, SYS_lseek, SYS_fadvise64])
        .any(&[SYS_fstat, SYS_fstatfs])
        .one_of(SYS_ioctl, 1, &IOCTLS)
}

/// I/O on connected sockets.
fn socket_io() -> Calls {
    Calls::default()
        .any(&[SYS_recvmsg, SYS_sendmsg, SYS_recvfrom, SYS_sendto])
        .any(&[SYS_shutdown, SYS_getsockopt, SYS_setsockopt])
        .any(&[SYS_getsockname, SYS_getpeername])
}

/// Access by name to files that exist.
fn names() -> Calls {
    let makes = (libc::O_CREAT | libc::O_TRUNC) as u64;
    let calls = Calls::default()
        .only(SYS_openat, 2, Test::None(makes))
        .any(&[SYS_statx, SYS_getdents64, SYS_readlinkat, SYS_statfs])
        .any(&[libc::SYS_newfstatat, SYS_faccessat]);
    #[cfg(target_arch = "x86_64")]
    let calls = calls.only(libc::SYS_open, 1, Test::None(makes)).any(&[
        libc::SYS_stat,
        libc::SYS_lstat,
        libc::SYS_readlink,
    ]);
    calls
}

fn epoll() -> Calls {
    let calls = Calls::default()
        .any(&[SYS_epoll_create1, SYS_epoll_ctl])
        .any(&[SYS_epoll_pwait, SYS_epoll_pwait2]);
    #[cfg(target_arch = "x86_64")]
    let calls = calls.any(&[libc::SYS_epoll_wait]);
    calls
}

pub(crate) fn worker() -> Calls {
    common()
        .and(file_io())
        .and(socket_io())
        .and(epoll())
        .any(&[SYS_io_uring_enter, SYS_io_uring_register])
        .any(&[SYS_io_setup, SYS_io_submit, SYS_io_getevents])
        .any(&[SYS_io_cancel, SYS_io_destroy])
        .any(&[SYS_eventfd2, SYS_dup3, SYS_mincore, SYS_statx])
}

pub(crate) fn io() -> Calls {
    common().and(file_io())
}

/// Calls of a thread that serves a vhost-user session.
///
/// The thread reopens the image's files when a virtual machine starts to use the disk, and searches
/// /proc for the holder of a lock.
pub(crate) fn session() -> Calls {
    let calls = common()
        .and(file_io())
        .and(socket_io())
        .and(names())
        .and(epoll())
        .any(&[
            SYS_accept4,
            SYS_memfd_create,
            SYS_eventfd2,
            SYS_dup,
            SYS_dup3,
        ])
        .any(&[SYS_msync, SYS_mincore, SYS_sysinfo, SYS_prlimit64])
        .any(&[SYS_unlinkat, SYS_openat2, SYS_flock, SYS_geteuid])
        // Extended attributes: marks of superseded images and of images open for writing.
        .any(&[libc::SYS_fgetxattr, libc::SYS_fremovexattr])
        .any(&[libc::SYS_fsetxattr])
        .any(&[libc::SYS_name_to_handle_at]);
    #[cfg(target_arch = "x86_64")]
    let calls = calls.any(&[libc::SYS_unlink]);
    calls
}

pub(crate) fn nbd_listener() -> Calls {
    session()
}

pub(crate) fn nbd_connection() -> Calls {
    session()
}

/// Calls of the threads of a mounted file.
///
/// The session thread reopens the image's files when a program opens the file, as a vhost-user
/// session does.
pub(crate) fn fuse() -> Calls {
    session()
}

pub(crate) fn log() -> Calls {
    common().and(file_io())
}

/// Calls of all kinds of data-plane threads.
fn data_plane() -> Calls {
    let lists = [
        worker(),
        io(),
        session(),
        nbd_listener(),
        nbd_connection(),
        fuse(),
        log(),
    ];
    lists.into_iter().fold(Calls::default(), Calls::and)
}

/// Calls of a tenant process: those of its data plane, and those of its main thread, which creates
/// threads, io_uring instances and files.
pub(crate) fn tenant() -> Calls {
    let calls = data_plane()
        .any(&[SYS_io_uring_setup, SYS_openat, SYS_openat2, SYS_pipe2])
        .any(&[SYS_unlinkat, SYS_mkdirat, SYS_getcwd])
        .any(&[libc::SYS_renameat, SYS_renameat2])
        .any(&[SYS_fchmod, SYS_fchmodat, SYS_fchown, SYS_fchownat])
        .any(&[SYS_faccessat2, SYS_uname, SYS_getppid])
        .any(&[SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid])
        .any(&[
            SYS_getresuid,
            SYS_getresgid,
            libc::SYS_listen,
            libc::SYS_socketpair,
        ])
        .one_of(SYS_ioctl, 1, &[TCGETS]);
    #[cfg(target_arch = "x86_64")]
    let calls = calls.any(&[libc::SYS_access, libc::SYS_rename]);
    calls
}

/// Calls of libraries that make connections.
pub(crate) fn network() -> Calls {
    let calls = Calls::default()
        .any(&[libc::SYS_socket, libc::SYS_connect, libc::SYS_bind])
        .any(&[libc::SYS_sendmmsg, libc::SYS_recvmmsg]);
    // The number of bytes of a name server's reply.
    let calls = calls.one_of(SYS_ioctl, 1, &[FIONREAD]);
    #[cfg(target_arch = "x86_64")]
    let calls = calls.any(&[libc::SYS_epoll_create, libc::SYS_chmod]);
    calls
}

/// Calls that start other programs, or make memory executable.
pub(crate) fn programs() -> Calls {
    Calls::default()
        .any(&[libc::SYS_execve, libc::SYS_execveat])
        .only(SYS_mprotect, 2, Test::All(EXEC))
}

/// Calls that no thread makes, but an attacker would.
pub(crate) fn attacks() -> Calls {
    let anonymous_code = [
        (2, Test::All(EXEC)),
        (3, Test::All(libc::MAP_ANONYMOUS as u64)),
    ];
    let write_and_run = EXEC | libc::PROT_WRITE as u64;
    let calls = Calls::default()
        .and(others())
        .and(privileges())
        .and(mounts())
        .and(machine())
        .if_all(SYS_mmap, &anonymous_code)
        .only(SYS_mmap, 2, Test::All(write_and_run))
        .only(SYS_mprotect, 2, Test::All(write_and_run))
        .any(&[libc::SYS_pkey_mprotect, libc::SYS_remap_file_pages])
        .any(&[libc::SYS_shmget, libc::SYS_shmat, libc::SYS_msgget])
        .any(&[libc::SYS_semget, libc::SYS_mq_open]);
    // New processes.
    let calls = not_threads(calls);
    #[cfg(target_arch = "x86_64")]
    let calls = calls
        .any(&[libc::SYS_fork, libc::SYS_vfork, libc::SYS_modify_ldt])
        .any(&[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_uselib]);
    calls
}

/// clone(2) for anything but a thread: each of the required flags may be missing.
fn not_threads(calls: Calls) -> Calls {
    let bits = [libc::CLONE_VM, libc::CLONE_SIGHAND, libc::CLONE_THREAD];
    let without = |calls: Calls, bit: &i32| calls.only(SYS_clone, 0, Test::None(*bit as u64));
    bits.iter().fold(calls, without)
}

/// Calls that inspect or disturb other processes.
fn others() -> Calls {
    Calls::default()
        .any(&[libc::SYS_ptrace, libc::SYS_kcmp, libc::SYS_process_madvise])
        .any(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev])
        .any(&[libc::SYS_pidfd_getfd, libc::SYS_pidfd_send_signal])
        .any(&[libc::SYS_pidfd_open, libc::SYS_process_mrelease])
        .any(&[libc::SYS_kill, libc::SYS_tkill])
        .any(&[libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo])
        .any(&[libc::SYS_migrate_pages, libc::SYS_move_pages])
        .any(&[libc::SYS_perf_event_open, libc::SYS_userfaultfd])
}

fn privileges() -> Calls {
    Calls::default()
        .any(&[libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setgroups])
        .any(&[libc::SYS_setreuid, libc::SYS_setregid])
        .any(&[libc::SYS_setresuid, libc::SYS_setresgid])
        .any(&[libc::SYS_setfsuid, libc::SYS_setfsgid])
        .any(&[libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key])
        .any(&[libc::SYS_unshare, libc::SYS_setns, libc::SYS_personality])
}

fn mounts() -> Calls {
    Calls::default()
        .any(&[libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root])
        .any(&[libc::SYS_chroot, libc::SYS_open_tree, libc::SYS_move_mount])
        .any(&[libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount])
        .any(&[libc::SYS_fspick, libc::SYS_mount_setattr])
        .any(&[libc::SYS_open_by_handle_at, libc::SYS_mknodat])
        .any(&[libc::SYS_fanotify_init, libc::SYS_quotactl])
        .any(&[libc::SYS_quotactl_fd, libc::SYS_swapon, libc::SYS_swapoff])
}

/// Calls that only an administrator needs.
fn machine() -> Calls {
    Calls::default()
        .any(&[libc::SYS_bpf, libc::SYS_kexec_load, libc::SYS_reboot])
        .any(&[libc::SYS_init_module, libc::SYS_finit_module])
        .any(&[libc::SYS_delete_module, libc::SYS_acct, libc::SYS_syslog])
        .any(&[libc::SYS_kexec_file_load, libc::SYS_vhangup])
        .any(&[libc::SYS_settimeofday, libc::SYS_clock_settime])
        .any(&[libc::SYS_adjtimex, libc::SYS_clock_adjtime])
        .any(&[libc::SYS_sethostname, libc::SYS_setdomainname])
}
