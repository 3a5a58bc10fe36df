//! Error messages for unknown names.

use crate::nearest;

/// Returns the error message for an unknown name: `unknown WHAT 'NAME'` and a hint.
///
/// The hint suggests the nearest known name and appends `list`, which says where the names are
/// listed. If no known name is similar, the hint lists all of them.
pub fn unknown_name(what: &str, name: &str, known: &[&str], list: &str) -> String {
    let hint = match nearest(name, known.iter().copied()) {
        Some(one) => format!("did you mean '{one}'? {list}"),
        None => format!("known are {}", known.join(", ")),
    };
    match known.is_empty() {
        true => format!("unknown {what} '{name}'"),
        false => format!("unknown {what} '{name}'; {hint}"),
    }
}

/// Rewrites serde's error for an unknown key or value into the form of [`unknown_name`].
///
/// Returns other texts unchanged. `list` says where the keys are listed.
pub fn serde_text(text: &str, list: &str) -> String {
    let kinds = [("unknown field `", "key"), ("unknown variant `", "value")];
    let found = kinds.iter().find_map(|(begin, what)| {
        let (name, rest) = text.strip_prefix(begin)?.split_once('`')?;
        Some((*what, name, rest))
    });
    let Some((what, name, rest)) = found else {
        return text.to_owned();
    };
    // serde lists the names as `a`, or `b`; errors of serde_json end with "at line 1 column 2".
    let mut parts = rest.split('`');
    let mut known = Vec::new();
    let mut end = parts.next().unwrap_or_default();
    while let (Some(one), Some(after)) = (parts.next(), parts.next()) {
        known.push(one);
        end = after;
    }
    let place = end.find("at line ").map_or("", |at| &end[at..]);
    match (what, place) {
        // A key has few values, so the message lists all of them.
        ("value", "") => unknown_value(name, &known),
        ("value", place) => format!("{} ({place})", unknown_value(name, &known)),
        (_, "") => unknown_name(what, name, &known, list),
        (_, place) => format!("{} ({place})", unknown_name(what, name, &known, list)),
    }
}

fn unknown_value(name: &str, known: &[&str]) -> String {
    format!("unknown value '{name}'; known are {}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "see the manual";

    #[test]
    fn the_nearest_name_is_suggested_or_all_are_listed() {
        let keys = ["image", "size"];
        for (name, known, expected) in [
            (
                "imag",
                &keys[..],
                "unknown key 'imag'; did you mean 'image'? see the manual",
            ),
            ("x", &keys, "unknown key 'x'; known are image, size"),
            ("x", &[], "unknown key 'x'"),
        ] {
            assert_eq!(unknown_name("key", name, known, LIST), expected);
        }
    }

    #[test]
    fn texts_of_serde_are_rewritten() {
        for (text, expected) in [
            (
                "unknown field `imag`, expected one of `name`, `image`, `size`",
                "unknown key 'imag'; did you mean 'image'? see the manual",
            ),
            (
                "unknown field `x`, expected `name` or `image` at line 1 column 4",
                "unknown key 'x'; known are name, image (at line 1 column 4)",
            ),
            ("unknown field `x`, there are no fields", "unknown key 'x'"),
            (
                "unknown variant `yes`, expected `off` or `on`",
                "unknown value 'yes'; known are off, on",
            ),
            ("missing field `name`", "missing field `name`"),
        ] {
            assert_eq!(serde_text(text, LIST), expected);
        }
    }
}
