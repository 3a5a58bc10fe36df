//! Modes and groups of sockets.

use std::ffi::CString;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr;
use std::str::FromStr;

/// Permissions as chmod(1) has them: `660`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        let mode = u32::from_str_radix(text, 8).ok().filter(|m| *m <= 0o777);
        let mode = mode.ok_or_else(|| format!("'{text}' is not a mode such as 660"));
        mode.map(Mode)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:o}", self.0)
    }
}

/// A group, which has a name or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group(pub u32);

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Group, String> {
        let number = text.parse().map_or_else(|_| number_of(text), Ok);
        number.map(Group)
    }
}

/// Shows the number of the group.
impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of the group of that name.
fn number_of(text: &str) -> Result<u32, String> {
    let unknown =
        || format!("no group '{text}' on this machine; name an existing group, or give its number");
    let name = CString::new(text).map_err(|_| unknown())?;
    // Large enough for a group with thousands of members.
    let mut buffer = vec![0; 1 << 20];
    let mut entry = MaybeUninit::<libc::group>::uninit();
    let mut found = ptr::null_mut();
    // SAFETY: all arguments are ours; on success `found` is null, or `entry`,
    // which is initialised then.
    let number = unsafe {
        let (buffer, len) = (buffer.as_mut_ptr(), buffer.len());
        libc::getgrnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer, len, &mut found);
        found.as_ref().map(|group| group.gr_gid)
    };
    number.ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!("660".parse(), Ok(Mode(0o660)));
        assert_eq!("0600".parse(), Ok(Mode(0o600)));
        assert_eq!(Mode(0o640).to_string(), "640");
        for bad in ["", "8", "1777", "rw", "-1"] {
            assert!(bad.parse::<Mode>().is_err(), "{bad}");
        }
    }

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!("root".parse(), Ok(Group(0)));
        assert_eq!("64002".parse(), Ok(Group(64002)));
        for bad in ["", "no such group", "-1", "a\0b"] {
            assert!(bad.parse::<Group>().is_err(), "{bad}");
        }
    }
}
