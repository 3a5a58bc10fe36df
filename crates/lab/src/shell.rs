//! Quotes text for shells.

/// Quotes any text as one word of a shell.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_any_path_as_it_is() {
        for path in ["/a b/it's $HOME", "/`x`"] {
            let script = format!("printf %s {}", quoted(path));
            assert_eq!(
                crate::host::run("busybox", &["sh", "-c", &script]).unwrap(),
                path
            );
        }
    }
}
