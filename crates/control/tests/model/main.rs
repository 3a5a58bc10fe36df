//! Explores the registry's states: every order of requests, of the ends of operations, and of failures and crashes, in
//! small worlds. In each state the properties of `properties.rs` must hold.
//!
//! `old_rules.rs` shows that the exploration finds the faults that earlier versions had.

mod explore;
mod host;
mod old_rules;
mod properties;
mod scenarios;
mod store;
mod world;
