//! Reads the conditions of a request from its headers.

use axum::http::{HeaderMap, header};
use fathom_control::Condition;

/// Returns the condition that `If-Match` and `If-None-Match` state.
pub fn condition(headers: &HeaderMap) -> Condition {
    let tags = |header| {
        let values = headers.get_all(header).iter();
        let lists = values.map(|value| value.to_str().unwrap_or_default());
        let tags = lists.flat_map(|list| list.split(',')).map(str::trim);
        tags.map(str::to_owned).collect::<Vec<_>>()
    };
    Condition {
        wanted: tags(header::IF_MATCH),
        unwanted: tags(header::IF_NONE_MATCH),
    }
}
