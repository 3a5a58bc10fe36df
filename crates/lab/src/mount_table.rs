//! Names in the kernel's mount tables.

/// Decodes a name in a mount table, where blanks and some other characters are `\ooo`, three octal
/// digits (proc_pid_mountinfo(5)).
pub(crate) fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let byte = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok())
            .filter(u8::is_ascii);
        match byte {
            Some(byte) => {
                out.push(byte.into());
                out += &part[3..];
            }
            None => {
                out.push('\\');
                out += part;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded() {
        for (text, name) in [
            ("/srv", "/srv"),
            ("/a\\040b\\011c\\012", "/a b\tc\n"),
            ("\\134\\043x", "\\#x"),
            ("/a\\", "/a\\"),
            ("/a\\9\\04ü", "/a\\9\\04ü"),
        ] {
            assert_eq!(unescaped(text), name, "{text}");
        }
    }
}
