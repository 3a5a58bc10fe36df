//! What an image's file shows to everybody, before it is opened as a disk: who
//! else uses it (QEMU's locks), and the format that its first bytes tell.

pub mod lock;
pub mod magic;

mod holder;
