//! Explores the registry's states in small worlds: every order of requests, ends of operations,
//! failures and crashes. In each state the properties of `properties.rs` must hold.
//!
//! `old_rules.rs` shows that the exploration finds the faults that earlier versions had.

mod explore;
mod host;
mod old_rules;
mod properties;
mod scenarios;
mod store;
mod world;
