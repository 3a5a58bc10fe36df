//! Bodies of fuzz targets.

mod fuzz;

pub use fuzz::{image, walk};
