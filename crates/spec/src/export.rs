//! Names and descriptions of NBD exports.

/// Maximum length in bytes of a string in the NBD protocol.
const MAX_TEXT: usize = 4096;

/// Refuses a text that the NBD protocol cannot transfer.
pub fn check_text(text: &str) -> Result<(), String> {
    match text.len() {
        0..=MAX_TEXT if !text.contains('\0') => Ok(()),
        0..=MAX_TEXT => Err("contains a NUL byte".into()),
        len => Err(format!("{len} bytes exceed the limit of {MAX_TEXT}")),
    }
}

pub(crate) fn parse_text(text: &str) -> Result<String, String> {
    check_text(text).map(|()| text.to_owned())
}
