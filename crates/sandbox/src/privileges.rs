//! Users, capabilities, and what a process may become.

use libc::{c_int, c_ulong};
use std::io;

/// `struct __user_cap_header_struct`, and the version with 64 bits.
#[repr(C)]
struct Header {
    version: u32,
    pid: c_int,
}
const VERSION_3: u32 = 0x2008_0522;

fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn prctl(option: c_int, value: c_ulong) -> io::Result<()> {
    // SAFETY: these options use no memory.
    check(unsafe { libc::prctl(option, value, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong) })
}

/// No program that this thread starts has more rights than it, whatever its file says.
pub(crate) fn no_new() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// All capabilities of this thread; it cannot get them back.
pub(crate) fn drop_of_thread() -> io::Result<()> {
    let header = Header {
        version: VERSION_3,
        pid: 0,
    };
    // Effective, permitted, inheritable; the lower half of each and then the upper.
    let none = [0u32; 6];
    // SAFETY: capset(2) reads a header and, in this version, two structures of three words.
    match unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// No program's file gives capabilities any more. It is itself a privilege to say so.
fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Ok(()) => {}
            // Beyond the last one.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Where it cannot be said, that there are to be no new privileges keeps these away.
pub(crate) fn drop_bounding_set_if_possible() -> io::Result<()> {
    match drop_bounding_set() {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        result => result,
    }
}

/// All capabilities, for good.
pub(crate) fn drop_all() -> io::Result<()> {
    drop_bounding_set_if_possible()?;
    prctl(
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong,
    )?;
    drop_of_thread()
}

/// linux/capability.h.
const CAP_KILL: u32 = 5;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;

/// Whether this thread can have processes of other users, and end them.
pub fn may_change_users() -> bool {
    let header = Header {
        version: VERSION_3,
        pid: 0,
    };
    let mut sets = [0u32; 6];
    // SAFETY: capget(2) reads a header and, in this version, writes two structures of three words.
    let got = unsafe { libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()) };
    let wanted = 1 << CAP_KILL | 1 << CAP_SETGID | 1 << CAP_SETUID;
    got == 0 && sets[0] & wanted == wanted
}

/// Become that user, with that group and no other.
pub(crate) fn become_user(uid: libc::uid_t, gid: libc::gid_t) -> io::Result<()> {
    // SAFETY: an empty list.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: no memory.
    check(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: no memory.
    check(unsafe { libc::setresuid(uid, uid, uid) })
}

/// Whether there is no way back to another user.
pub(crate) fn is_user(uid: libc::uid_t, gid: libc::gid_t) -> bool {
    let (mut users, mut groups) = ([0; 3], [0; 3]);
    let [r, e, s] = &mut users;
    // SAFETY: three places to write to.
    let known = unsafe { libc::getresuid(r, e, s) } == 0;
    let [r, e, s] = &mut groups;
    // SAFETY: likewise.
    let known = known && unsafe { libc::getresgid(r, e, s) } == 0;
    known && users == [uid; 3] && groups == [gid; 3]
}

/// Who changes its user is nobody's in /proc: not even its own files there are for it then.
pub(crate) fn stay_dumpable() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 1)
}
