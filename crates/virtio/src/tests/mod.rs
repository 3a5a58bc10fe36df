//! Tests of the crate's parts together.

mod answers;
mod chains;
mod dirty;
mod events;
mod fixture;
mod hostile;
mod oracle;
mod packed;
