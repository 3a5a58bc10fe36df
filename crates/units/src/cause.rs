//! Texts of errors as the cause in a message.

use std::fmt::Display;

/// Text between the kernel's message and the error number in errors of the standard library.
const NUMBER: &str = " (os error ";

/// Formats an error as the cause in a message, without `(os error N)`.
///
/// The kernel's text begins in lower case. `error` is an [`io::Error`](std::io::Error), an error
/// number, or an error of another library whose text may contain an `io::Error`.
pub fn cause<E: Display>(error: E) -> String {
    let text = error.to_string();
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some((kernel, after)) = split_number(rest) {
        let begin = kernel.rfind(": ").map_or(0, |colon| colon + 2);
        out.push_str(&kernel[..begin]);
        out.push_str(&lower_case(&kernel[begin..]));
        rest = after;
    }
    out + rest
}

/// Splits a text at its first error number and returns the parts before and after it.
fn split_number(text: &str) -> Option<(&str, &str)> {
    let (before, after) = text.split_once(NUMBER)?;
    let (number, after) = after.split_once(')')?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some((before, after))
}

/// Returns a text with its first letter in lower case, unless its first word is an abbreviation
/// (`RPC`, `.lib`).
fn lower_case(text: &str) -> String {
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            let rest = &text[first.len_utf8()..];
            format!("{}{rest}", first.to_lowercase())
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn error_numbers_are_left_out() {
        let missing = io::Error::from_raw_os_error(2);
        assert_eq!(
            missing.to_string(),
            "No such file or directory (os error 2)"
        );
        assert_eq!(cause(&missing), "no such file or directory");
        let nested = io::Error::other(format!("disk.key: {missing}; create it"));
        assert_eq!(
            cause(nested),
            "disk.key: no such file or directory; create it"
        );
        assert_eq!(
            cause("A: Is it? (os error 1), B (os error 2)"),
            "A: is it?, B"
        );
    }

    #[test]
    fn other_texts_are_left_as_they_are() {
        for text in [
            "",
            "Invalid key",
            "x (os error two)",
            "x (os error 2",
            "TLS: Ä (os error)",
        ] {
            assert_eq!(cause(text), text);
        }
    }
}
