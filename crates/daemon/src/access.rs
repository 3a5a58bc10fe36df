//! Who may connect to a socket, as people write it.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::ptr;

/// Permissions as chmod(1) has them: `660`.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|m| *m <= 0o777);
    mode.ok_or_else(|| format!("'{text}' is not a mode such as 660"))
}

/// A group's number, from its name or number.
pub fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let unknown = || format!("there is no group '{text}'");
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
        assert_eq!(parse_mode("660"), Ok(0o660));
        assert_eq!(parse_mode("0600"), Ok(0o600));
        for bad in ["", "8", "1777", "rw", "-1"] {
            assert!(parse_mode(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!(parse_group("root"), Ok(0));
        assert_eq!(parse_group("64002"), Ok(64002));
        for bad in ["", "no such group", "-1", "a\0b"] {
            assert!(parse_group(bad).is_err(), "{bad}");
        }
    }
}
