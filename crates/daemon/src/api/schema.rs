//! JSON Schemas of what other crates define.

use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A filter, and those of its options that are not at their defaults.
#[derive(Serialize, ToSchema)]
pub struct Filter {
    pub name: String,
    pub options: BTreeMap<String, String>,
}

/// Where requests spent their time, by operation and stage: what `fathom stats --json` prints.
#[derive(Serialize, ToSchema)]
#[schema(value_type = Object)]
pub struct Statistics(serde_json::Value);
