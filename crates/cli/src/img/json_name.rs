//! QEMU's `json:` names of images:
//! `json:{"driver": "qcow2", "file": {"driver": "file", "filename": "disk.qcow2"}}`.

use serde_json::{Map, Value};

const PREFIX: &str = "json:";

/// Returns the options in a `json:` name, or `None` if `text` is another name.
///
/// The options have the names of `--image-opts`, such as `file.filename`.
pub(super) fn options(text: &str) -> Option<Result<Vec<(String, String)>, String>> {
    let json = text.strip_prefix(PREFIX)?;
    Some(parse(json).map_err(|why| {
        format!("invalid name: {why}; for a file of this name, write ./{PREFIX}...")
    }))
}

fn parse(json: &str) -> Result<Vec<(String, String)>, String> {
    let object: Map<String, Value> =
        serde_json::from_str(json).map_err(|error| error.to_string())?;
    let mut options = Vec::new();
    flatten("", object, &mut options)?;
    Ok(options)
}

/// Appends the options in `object`. The JSON parser limits the depth.
fn flatten(
    prefix: &str,
    object: Map<String, Value>,
    options: &mut Vec<(String, String)>,
) -> Result<(), String> {
    for (name, value) in object {
        let name = format!("{prefix}{name}");
        let text = match value {
            Value::Object(inner) => {
                flatten(&format!("{name}."), inner, options)?;
                continue;
            }
            Value::String(text) => text,
            Value::Number(number) => number.to_string(),
            Value::Bool(true) => "on".to_owned(),
            Value::Bool(false) => "off".to_owned(),
            Value::Null | Value::Array(_) => {
                return Err(format!(
                    "the value of '{name}' must be a text, a number or an object"
                ));
            }
        };
        options.push((name, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_objects_become_names_with_dots() {
        let name = r#"json:{"driver": "qcow2", "file": {"driver": "nbd", "server": {"port": 1}}, "file.export": "a,b"}"#;
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let expected = vec![
            pair("driver", "qcow2"),
            pair("file.driver", "nbd"),
            pair("file.server.port", "1"),
            pair("file.export", "a,b"),
        ];
        let mut found = options(name).expect("such a name").expect("valid");
        found.sort();
        let mut expected = expected;
        expected.sort();
        assert_eq!(found, expected);
        assert!(options("disk.qcow2").is_none());
    }

    #[test]
    fn invalid_json_is_rejected() {
        for bad in [
            "json:",
            "json:x",
            "json:[]",
            "json:{",
            r#"json:{"a": [1]}"#,
            r#"json:{"a": null}"#,
        ] {
            assert!(options(bad).expect("such a name").is_err(), "{bad}");
        }
        let deep = format!("json:{}1{}", r#"{"a":"#.repeat(10_000), "}".repeat(10_000));
        assert!(options(&deep).expect("such a name").is_err());
    }
}
