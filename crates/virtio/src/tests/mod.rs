//! Tests of the crate's parts together.

mod answers;
mod chains;
mod events;
mod fixture;
