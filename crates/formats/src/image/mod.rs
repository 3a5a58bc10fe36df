//! Serving images.

#[cfg_attr(not(test), allow(dead_code, reason = "for what serves images"))]
pub(crate) mod helpers;
