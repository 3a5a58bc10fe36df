//! What an image may cost.

/// Bytes of memory that all tables of an image may take.
pub const MAX_TABLES: u64 = 256 << 20;
