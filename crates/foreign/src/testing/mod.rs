//! The bodies of the fuzz targets.

mod fuzz;

pub use fuzz::{image, walk};
