//! Experiments: what is served, what the guest does, what is reported.

mod image;
pub mod seqread;
pub mod wiki;
