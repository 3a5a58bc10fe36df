//! A disk in memory that answers when the test wants, a poll(2) engine, and
//! a guest: a memory file, a front-end and a driver of its rings.

#![allow(dead_code)] // Each test file uses a part of it.

pub mod disk;
pub mod engine;
pub mod guest;
pub mod raw;
pub mod served;
