//! Users, groups, capabilities, and the no-new-privileges flag.

use libc::{c_int, c_ulong};
use std::io;

/// `struct __user_cap_header_struct`. Version 3 has 64-bit capability sets.
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

/// Prevents programs that this thread starts from gaining privileges, for example by a set-user-ID
/// file.
pub(crate) fn no_new() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Drops all capabilities of this thread permanently.
pub(crate) fn drop_of_thread() -> io::Result<()> {
    let header = Header {
        version: VERSION_3,
        pid: 0,
    };
    // Effective, permitted and inheritable sets: first the lower halves, then the upper halves.
    let none = [0u32; 6];
    // SAFETY: capset(2) reads a header and, in this version, two structures of three words.
    match unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Prevents programs from gaining capabilities from their files. This itself requires CAP_SETPCAP.
fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Ok(()) => {}
            // The first number after the last capability.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Drops the bounding set if this process has the permission to. Otherwise the no-new-privileges
/// flag has the same effect.
pub(crate) fn drop_bounding_set_if_possible() -> io::Result<()> {
    match drop_bounding_set() {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        result => result,
    }
}

/// Drops all capabilities of this thread permanently, and empties the bounding set.
pub(crate) fn drop_all() -> io::Result<()> {
    drop_bounding_set_if_possible()?;
    prctl(
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong,
    )?;
    drop_of_thread()
}

/// Numbers of capabilities, from linux/capability.h.
const CAP_KILL: u32 = 5;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;

/// Returns whether this thread can start processes of other users, and end them.
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

/// Changes to this user, with this group and no other.
pub(crate) fn become_user(uid: libc::uid_t, gid: libc::gid_t) -> io::Result<()> {
    // SAFETY: the list is empty, so no memory is read.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: the call uses no memory.
    check(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: the call uses no memory.
    check(unsafe { libc::setresuid(uid, uid, uid) })
}

/// Returns whether the real, effective and saved IDs are these, so that the process cannot change
/// back.
pub(crate) fn is_user(uid: libc::uid_t, gid: libc::gid_t) -> bool {
    let (mut users, mut groups) = ([0; 3], [0; 3]);
    let [r, e, s] = &mut users;
    // SAFETY: the call writes to three valid IDs.
    let known = unsafe { libc::getresuid(r, e, s) } == 0;
    let [r, e, s] = &mut groups;
    // SAFETY: the call writes to three valid IDs.
    let known = known && unsafe { libc::getresgid(r, e, s) } == 0;
    known && users == [uid; 3] && groups == [gid; 3]
}

/// Makes the process dumpable again after a change of user.
///
/// The kernel clears this flag then, and /proc would belong to root: the process could not access
/// its own files there.
pub(crate) fn stay_dumpable() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 1)
}
