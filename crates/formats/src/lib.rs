//! Where a guest's byte lives: the image formats qcow2 and QED, and the
//! offline tools on them.
//!
//! [`qcow2`] and [`qed`] are the formats' structures: parsing and encoding of
//! bytes, with every field checked, and no I/O. [`img`] is what
//! `fathom img create | info | check` does with them, by way of [`ImageFile`].
//!
//! Images come from strangers. Whatever is read from one is bounded before
//! anything is allocated or repeated for its sake, and each refusal is one
//! line ([`Error`]).

mod error;
mod file;
pub mod image;
pub mod img;
pub mod qcow2;
pub mod qed;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, Result};
pub use file::{ImageFile, read_up_to};
