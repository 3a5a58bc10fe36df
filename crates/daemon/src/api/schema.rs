//! JSON Schemas of what other crates define.

use fathom_control::Owner;
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A filter, with those of its options that are not at their defaults.
#[derive(Serialize, ToSchema)]
pub struct Filter {
    /// Name of the filter, such as `throttle`.
    pub name: String,
    /// Values of the options, by name.
    pub options: BTreeMap<String, String>,
    /// Time that all workers together have delayed requests because of the filter's limits, in nanoseconds. Absent if
    /// the filter does not count this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_ns: Option<u64>,
    /// Owner of the disk's name: `static` in the reply to a change that lasts until the server restarts. Absent in
    /// other replies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

/// Time that requests spent in each stage, by operation: the output of `fathom stats --json`.
#[derive(Serialize, ToSchema)]
#[schema(value_type = Object)]
pub struct Statistics(serde_json::Value);

/// A slow request, with the time that it spent in each stage.
#[derive(Serialize, ToSchema)]
pub struct SlowRequest {
    /// Identifier of the request. The exemplars of metrics have the same identifier.
    pub id: String,
    /// Time of the request's completion, in milliseconds since 1970.
    pub time_ms: u64,
    /// Name of the operation, such as `read`.
    pub op: String,
    /// Offset of the request's data in the disk, in bytes.
    pub offset: u64,
    /// Length of the request's data in bytes.
    pub len: u64,
    /// Index of the virtqueue, or number of the NBD connection.
    pub queue: u16,
    /// 0, or the errno with which the request failed.
    pub error: i32,
    /// The worker found the request by polling, without a notification from the guest.
    pub polled: bool,
    /// Duration of the request in nanoseconds.
    pub total_ns: u64,
    /// Time in each stage in nanoseconds: `wake`, `queue`, `map`, `device`, `finish` and `notify`.
    pub stages: BTreeMap<String, u64>,
    /// Name of the stage in which the request spent the most time.
    pub longest: String,
}

/// The slowest recent requests of a disk, the slowest first.
#[derive(Serialize, ToSchema)]
pub struct SlowRequests {
    pub requests: Vec<SlowRequest>,
}
