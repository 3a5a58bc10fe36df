//! Removes secrets from URLs.

use std::borrow::Cow;

/// Text that replaces a secret.
const HIDDEN: &str = "***";

/// Schemes whose queries may contain signatures, which let anybody read the object. Queries of
/// other schemes only name sockets and certificates.
const SIGNED: [&str; 3] = ["https", "http", "s3"];

/// Returns `text` with the secrets of its URLs (`SCHEME://...`) replaced by `***`.
///
/// Secrets are the queries of `https`, `http` and `s3` URLs, and the passwords of all URLs. A URL
/// ends before white space, a control character, a quotation mark, `<` or `>`. Punctuation at its
/// end is not part of it.
pub fn redacted(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(found) = rest.find("://") {
        let (before, after) = rest.split_at(found);
        let (address, next) = after["://".len()..].split_at(end_of(&after["://".len()..]));
        let scheme = before.rsplit(|c: char| !is_of_scheme(c)).next();
        out.push_str(before);
        out.push_str("://");
        redact(scheme.unwrap_or_default(), address, &mut out);
        rest = next;
    }
    match out.is_empty() {
        true => Cow::Borrowed(text),
        false => Cow::Owned(out + rest),
    }
}

fn is_of_scheme(c: char) -> bool {
    c.is_ascii_alphanumeric() || "+-.".contains(c)
}

/// Returns the length of the URL at the start of `text`.
fn end_of(text: &str) -> usize {
    let is_end = |c: char| c.is_whitespace() || c.is_control() || "'\"`<>".contains(c);
    let end = text.find(is_end).unwrap_or(text.len());
    text[..end]
        .trim_end_matches([':', ',', ';', '.', ')'])
        .len()
}

/// Appends `address`, the part of a URL after `://`, to `out` without its secrets.
fn redact(scheme: &str, address: &str, out: &mut String) {
    let place = address.find(['/', '?', '#']).unwrap_or(address.len());
    let (authority, path) = address.split_at(place);
    match authority.rsplit_once('@') {
        Some((user, host)) if user.contains(':') => {
            let name = user.split(':').next().unwrap_or_default();
            out.push_str(name);
            out.push(':');
            out.push_str(HIDDEN);
            out.push('@');
            out.push_str(host);
        }
        _ => out.push_str(authority),
    }
    let is_signed = SIGNED.iter().any(|one| one.eq_ignore_ascii_case(scheme));
    match path.find('?') {
        Some(query) if is_signed => {
            out.push_str(&path[..=query]);
            out.push_str(HIDDEN);
        }
        _ => out.push_str(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_addresses_are_hidden_and_nothing_else() {
        for (text, expected) in [
            ("no address", "no address"),
            ("a://", "a://"),
            ("https://h/x.raw", "https://h/x.raw"),
            ("https://h/x?sig=1&y=2", "https://h/x?***"),
            ("HTTPS://h?sig=1#f", "HTTPS://h?***"),
            (
                "cached:https://h/x?sig=1: it is away (http://p/?a, 's3://b/k?c' and s3://b/k).",
                "cached:https://h/x?***: it is away (http://p/?***, 's3://b/k?***' and s3://b/k).",
            ),
            ("https://u:p@ss@h/x?a://b?c", "https://u:***@h/x?***"),
            ("nbd://u:p@h:10809/x", "nbd://u:***@h:10809/x"),
            ("http://u@h/x", "http://u@h/x"),
            (
                "http://[::1]:80/x?é\u{1b}[0m",
                "http://[::1]:80/x?***\u{1b}[0m",
            ),
            (
                "nbd+unix:///x?socket=/run/a.sock",
                "nbd+unix:///x?socket=/run/a.sock",
            ),
        ] {
            assert_eq!(redacted(text), expected);
        }
    }
}
