//! Limits on the resources that an image may use.

/// Maximum memory in bytes for all tables of an image.
pub const MAX_TABLES: u64 = 256 << 20;
