//! Versions of a disk: what it was added by decides.

use super::problem::Problem;
use axum::http::{HeaderMap, header};
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};

/// An entity tag (RFC 9110, 8.8.3).
pub fn of(options: &Value) -> String {
    let mut hasher = DefaultHasher::new();
    options.to_string().hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

/// Whether the request is meant for this disk (RFC 9110, 13.1); `None`: there is none.
pub fn check(headers: &HeaderMap, present: Option<&str>) -> Result<(), Problem> {
    let names = |header| {
        let values = headers.get_all(header).iter();
        let lists = values.map(|value| value.to_str().unwrap_or_default());
        let tags = lists.flat_map(|list| list.split(',')).map(str::trim);
        tags.map(str::to_owned).collect::<Vec<_>>()
    };
    let has = |tags: &[String]| {
        present.is_some_and(|present| tags.iter().any(|tag| tag == "*" || tag == present))
    };
    let (wanted, unwanted) = (names(header::IF_MATCH), names(header::IF_NONE_MATCH));
    match (!wanted.is_empty() && !has(&wanted), has(&unwanted)) {
        (true, _) => Err(Problem::changed()),
        (false, true) => Err(Problem::there_already()),
        (false, false) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn conditions_are_of_the_disk_that_is_there() {
        let tag = of(&json!({ "name": "a" }));
        assert_ne!(tag, of(&json!({ "name": "b" })));
        let holds = |name: &'static str, value: &str, present: Option<&str>| {
            let headers = [(name.parse().unwrap(), value.parse().unwrap())];
            check(&HeaderMap::from_iter(headers), present).is_ok()
        };
        let list = format!("\"x\", {tag}");
        for (value, present, matches) in [
            ("*", None, false),
            ("*", Some(&*tag), true),
            (&*tag, Some(&*tag), true),
            (&*list, Some(&*tag), true),
            ("\"x\"", Some(&*tag), false),
            (&*tag, None, false),
        ] {
            assert_eq!(holds("if-match", value, present), matches, "{value}");
            assert_eq!(holds("if-none-match", value, present), !matches, "{value}");
        }
        assert!(check(&HeaderMap::new(), None).is_ok());
    }
}
