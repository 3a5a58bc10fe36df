//! JSON Schemas of what other crates define.

use crate::owner::Owner;
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A filter, and those of its options that are not at their defaults.
#[derive(Serialize, ToSchema)]
pub struct Filter {
    pub name: String,
    pub options: BTreeMap<String, String>,
    /// For how long its workers have held requests back, all together, in ns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_ns: Option<u64>,
    /// `static` in the reply to a change that lasts until the server restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

/// Where requests spent their time, by operation and stage: what `fathom stats --json` prints.
#[derive(Serialize, ToSchema)]
#[schema(value_type = Object)]
pub struct Statistics(serde_json::Value);

/// A request as it went through the stages: times are in nanoseconds.
#[derive(Serialize, ToSchema)]
pub struct SlowRequest {
    /// For who looks for it again: metrics name it, too.
    pub id: String,
    /// When it was answered, in milliseconds since 1970.
    pub time_ms: u64,
    pub op: String,
    pub offset: u64,
    pub len: u64,
    pub queue: u16,
    /// 0, or the errno that it was answered with.
    pub error: i32,
    /// It was found by looking, without a kick.
    pub polled: bool,
    pub total_ns: u64,
    pub stages: BTreeMap<String, u64>,
    /// The stage in which it was for longest.
    pub longest: String,
}

#[derive(Serialize, ToSchema)]
pub struct SlowRequests {
    pub requests: Vec<SlowRequest>,
}
