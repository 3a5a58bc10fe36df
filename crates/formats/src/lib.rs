//! Where a guest's byte lives: the image formats qcow2 and QED, served, and
//! worked on offline.
//!
//! [`qcow2`] and [`qed`] are the formats' structures: parsing and encoding of
//! bytes, with every field checked, and no I/O. [`served`] is an image as a
//! running disk. [`offline`] is what `fathom img create | info | check` does with
//! images that nobody uses, by way of [`ImageFile`](fathom_files::ImageFile).
//!
//! Images come from strangers. Whatever is read from one is bounded before
//! anything is allocated or repeated for its sake, and each refusal is one
//! line ([`Error`]).

mod error;
mod foreign;
mod format;
mod luks;
mod names;
pub mod offline;
mod offset;
pub mod qcow2;
pub mod qed;
pub mod served;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, Result};
pub use format::Format;
pub use names::{file_name_of, resolve, shown};
pub use offset::{GuestOffset, HostOffset};
