//! Experiments: what is served, what the guest does, what is reported.

pub mod seqread;
