//! A guest of a test disk: a memory file, a front-end, and a driver of its rings.

#![allow(dead_code)] // Each test file uses a part of it.

pub mod fuse;
pub mod guest;
pub mod raw;
pub mod served;
