//! Slow requests of a disk, as a server tells them: whatever each of them has is shown.

use serde_json::Value;

/// Of the disk that is looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Slow {
    /// Not known yet.
    #[default]
    Unknown,
    /// The server keeps none.
    None,
    /// A line each.
    Some(Vec<String>),
}

impl Slow {
    pub fn of(told: Option<&Value>) -> Slow {
        let Some(told) = told else {
            return Slow::None;
        };
        let list = match told {
            Value::Array(list) => Some(list),
            // It is said with what else there is to say.
            Value::Object(all) => all.values().find_map(Value::as_array),
            _ => None,
        };
        match list {
            None => Slow::None,
            Some(list) => Slow::Some(list.iter().map(line).collect()),
        }
    }
}

fn line(request: &Value) -> String {
    let mut words = Vec::new();
    add("", request, &mut words);
    words.join(" ")
}

/// What is in an object has its name before it.
fn add(name: &str, value: &Value, words: &mut Vec<String>) {
    let named = |text: String| match name {
        "" => text,
        name => format!("{name}={text}"),
    };
    match value {
        Value::Null => {}
        Value::Object(parts) => {
            for (part, value) in parts {
                add(part, value, words);
            }
        }
        Value::String(text) => words.push(named(text.clone())),
        Value::Number(number) => {
            let rounded = number.as_f64().filter(|_| number.is_f64());
            words.push(named(
                rounded.map_or_else(|| number.to_string(), |n| format!("{n:.1}")),
            ));
        }
        Value::Bool(_) | Value::Array(_) => words.push(named(value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whatever_is_told_is_a_line_each() {
        assert_eq!(Slow::of(None), Slow::None);
        assert_eq!(Slow::of(Some(&json!(3))), Slow::None);
        let told = json!({ "kept": 2, "requests": [
            { "op": "read", "total_us": 30123.456, "stages": { "queue_us": 30000 }, "error": null },
            "strange"
        ] });
        assert_eq!(
            Slow::of(Some(&told)),
            Slow::Some(vec![
                "op=read queue_us=30000 total_us=30123.5".into(),
                "strange".into()
            ])
        );
    }
}
