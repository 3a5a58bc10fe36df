//! The users that tenants' processes run as, which have no other rights.

use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::fmt;
use std::fs;
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::ptr;
use std::str::FromStr;

/// A process's user, and its only group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// Numeric ID of the user.
    pub uid: u32,
    /// Numeric ID of the group.
    pub gid: u32,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let User { uid, gid } = self;
        match uid == gid {
            true => write!(f, "{uid}"),
            false => write!(f, "{uid}:{gid}"),
        }
    }
}

/// Users for tenants, in the syntax of the configuration: a range such as `100000-165535`, or one
/// user of the system by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Users {
    /// All tenants run as this user.
    One(User),
    /// Each tenant runs as another user of the range, with the group of the same number.
    Range(RangeInclusive<u32>),
}

impl FromStr for Users {
    type Err = String;

    fn from_str(text: &str) -> Result<Users, String> {
        let number = |text: &str| text.parse::<u32>().ok();
        if let Some((first, last)) = text.split_once('-')
            && let (Some(first), Some(last)) = (number(first), number(last))
        {
            return range(text, first, last);
        }
        let is_number = number(text);
        let user = match is_number {
            Some(uid) => by_number(uid).unwrap_or(User { uid, gid: uid }),
            None => by_name(text).ok_or_else(|| {
                format!("no user '{text}'; name a user, or a range such as 100000-165535")
            })?,
        };
        match user.uid {
            // For the kernel, -1 means "no change".
            0 | u32::MAX => Err(format!(
                "{text} cannot be a tenant's user, because it has privileges; name an \
                 unprivileged user"
            )),
            _ => Ok(Users::One(user)),
        }
    }
}

impl fmt::Display for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Users::One(user) => user.fmt(f),
            Users::Range(range) => write!(f, "{}-{}", range.start(), range.end()),
        }
    }
}

impl Users {
    /// Rejects users that this process cannot switch to.
    pub fn check(&self) -> Result<(), String> {
        if !fathom_sandbox::may_change_users() {
            return Err(
                "users: the server cannot start processes as other users without CAP_SETUID, \
                 CAP_SETGID and CAP_KILL; start it as root, or remove users"
                    .into(),
            );
        }
        let (uids, gids) = match self {
            Users::One(user) => (user.uid..=user.uid, user.gid..=user.gid),
            Users::Range(range) => (range.clone(), range.clone()),
        };
        for (map, ids) in [("uid_map", uids), ("gid_map", gids)] {
            // (Without the file, the kernel has no user namespaces.)
            let known = fs::read_to_string(format!("/proc/self/{map}"));
            if known.is_ok_and(|known| !has_all(&known, &ids)) {
                return Err(format!(
                    "users: {self}: not all are mapped in this user namespace \
                     (/proc/self/{map}); name others"
                ));
            }
        }
        Ok(())
    }
}

/// Parses a range, and rejects one that contains an existing user, whose files a tenant could open.
fn range(text: &str, first: u32, last: u32) -> Result<Users, String> {
    let range = first..=last;
    if range.is_empty() {
        return Err(format!("{text}: an empty range; write FIRST-LAST"));
    }
    let taken = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let mut taken = taken.lines().filter_map(|line| {
        let mut fields = line.split(':');
        Some((fields.next()?, fields.nth(1)?.parse::<u32>().ok()?))
    });
    if range.contains(&0) || range.contains(&u32::MAX) {
        return Err(format!("{text}: contains root or -1; name other numbers"));
    }
    match taken.find(|(_, uid)| range.contains(uid)) {
        None => Ok(Users::Range(range)),
        Some((name, uid)) => Err(format!(
            "{text}: contains user '{name}' ({uid}); name numbers that no user has, as in \
             /etc/subuid"
        )),
    }
}

/// Whether a line of `/proc/PID/uid_map` (first inside, first outside, count) contains all of these
/// ids. (A range that spans several lines is rare, and rejected.)
fn has_all(map: &str, ids: &RangeInclusive<u32>) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        first <= u64::from(*ids.start()) && u64::from(*ids.end()) < first.saturating_add(count)
    })
}

type Ask<'a> = &'a dyn Fn(*mut libc::passwd, &mut [libc::c_char], *mut *mut libc::passwd);

fn by_name(name: &str) -> Option<User> {
    let name = CString::new(name).ok()?;
    find(&|entry, buffer, found| {
        let (buffer, len) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: all pointers are valid: `find` passes a buffer and its length, and a place for
        // each result.
        unsafe { libc::getpwnam_r(name.as_ptr(), entry, buffer, len, found) };
    })
}

fn by_number(uid: u32) -> Option<User> {
    find(&|entry, buffer, found| {
        let (buffer, len) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: see `by_name`.
        unsafe { libc::getpwuid_r(uid, entry, buffer, len, found) };
    })
}

fn find(ask: Ask<'_>) -> Option<User> {
    let mut buffer = vec![0; 1 << 16];
    let mut entry = MaybeUninit::<libc::passwd>::uninit();
    let mut found = ptr::null_mut();
    ask(entry.as_mut_ptr(), &mut buffer, &mut found);
    // SAFETY: the pointer is null, or points to `entry`, which is initialised in that case.
    let found = unsafe { found.as_ref() };
    found.map(|user| User {
        uid: user.pw_uid,
        gid: user.pw_gid,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_a_range_or_one_that_there_is() {
        assert_eq!("100000-165535".parse(), Ok(Users::Range(100_000..=165_535)));
        let one = |uid, gid| Ok(Users::One(User { uid, gid }));
        assert_eq!("4000000".parse(), one(4_000_000, 4_000_000));
        assert_eq!("65534".parse(), "nobody".parse::<Users>());
        for (bad, wanted) in [
            ("", "no user ''"),
            ("no such", "no user 'no such'"),
            ("0", "has privileges"),
            ("root", "has privileges"),
            ("4294967295", "has privileges"),
            ("9-8", "FIRST-LAST"),
            ("100000-100000-1", "no user"),
            ("0-65535", "root"),
            ("100000-4294967295", "-1"),
            ("65000-65535", "'nobody' (65534)"),
            ("-1", "no user"),
        ] {
            let error = bad.parse::<Users>().unwrap_err();
            assert!(error.contains(wanted), "{bad}: {error}");
        }
        for text in ["100000-165535", "4000000"] {
            let users: Users = text.parse().unwrap();
            assert_eq!(users.to_string(), text);
        }
    }

    #[test]
    fn a_namespace_knows_some() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        assert!(has_all(map, &(0..=0)) && has_all(map, &(1..=65_536)));
        assert!(!has_all(map, &(1..=65_537)) && !has_all(map, &(100_000..=100_000)));
        assert!(has_all("0 0 4294967295", &(100_000..=u32::MAX - 1)));
        assert!(!has_all("", &(1..=1)) && !has_all("x y z", &(1..=1)));
    }
}
