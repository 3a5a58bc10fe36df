//! Makes text from other processes safe to show and to log.

use serde_json::Value;

/// Maximum length of a text in bytes, more than that of the longest path.
const MAX_TEXT: usize = 8 << 10;

/// Returns the text as one line of at most `most` bytes, without terminal control sequences.
pub fn one_line(text: &str, most: usize) -> String {
    let mut shown = String::new();
    for (at, char) in text.char_indices() {
        match char {
            _ if at + char.len_utf8() > most => return shown + "...",
            '\'' | '"' | '\\' => shown.push(char),
            _ => shown.extend(char.escape_debug()),
        }
    }
    shown
}

/// Makes a text safe to show. A safe text is unchanged.
pub fn clean_text(text: &mut String) {
    if text.len() > MAX_TEXT || text.contains(is_dangerous) {
        *text = one_line(text, MAX_TEXT);
    }
}

/// Makes all texts of a JSON value safe to show, including member names.
pub fn clean(value: &mut Value) {
    match value {
        Value::String(text) => clean_text(text),
        Value::Array(values) => values.iter_mut().for_each(clean),
        Value::Object(members) => {
            members.values_mut().for_each(clean);
            let is_safe = |name: &String| name.len() <= MAX_TEXT && !name.contains(is_dangerous);
            if !members.keys().all(is_safe) {
                let members = std::mem::take(members).into_iter();
                let cleaned = members.map(|(mut name, member)| {
                    clean_text(&mut name);
                    (name, member)
                });
                *value = Value::Object(cleaned.collect());
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns whether a character is a control character, ends a line or changes text direction.
fn is_dangerous(char: char) -> bool {
    let changes_lines = matches!(char, '\u{2028}' | '\u{2029}');
    let changes_direction = matches!(
        char,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    char.is_control() || changes_lines || changes_direction
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_dangerous_and_endless_texts_change() {
        let harmless = json!({"päth": ["/srv/ü \"'\\.raw", 7, null, true]});
        let mut value = harmless.clone();
        clean(&mut value);
        assert_eq!(value, harmless);
        let mut value = json!({"a\n": [{"b": "\u{1b}[31m\u{202e}"}], "c": "x".repeat(1 << 20)});
        clean(&mut value);
        assert_eq!(value["a\\n"][0]["b"], "\\u{1b}[31m\\u{202e}");
        assert_eq!(value["c"].as_str().map(str::len), Some(MAX_TEXT + 3));
    }
}
