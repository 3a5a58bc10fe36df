//! The image tool: what `fathom img` does. One module a command; each opens and locks the images
//! that it works on, as QEMU locks them, and leaves the work on structures to
//! [`fathom_formats::offline`].

mod amend;
mod archive;
mod background;
mod below;
mod bitmap;
mod chain;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
mod error;
mod incremental;
mod info;
mod job;
mod manifest;
mod map;
mod measure;
mod open;
mod progress;
mod rebase;
mod resize;
mod restore;
mod sink;
mod snapshot;
mod source;
mod stream;
mod streamed;
mod stripes;
mod target;

pub use amend::{AMENDABLE, amend};
pub use archive::{Archived, ListedImage, StripeOptions, Summary, archive, archived};
pub use bitmap::{BitmapChange, BitmapOptions, Listed, bitmap, bitmaps};
pub use check::{CheckOptions, Repair, Report, check};
pub use commit::{CommitOptions, commit};
pub use compare::{CompareOptions, Comparison, compare};
pub use convert::{Broken, ConvertOptions, convert};
pub use create::{Backing, CreateOptions, create};
pub use error::Error;
pub use fathom_formats::offline::SnapshotName;
pub use fathom_formats::{Format, shown};
pub use incremental::{IncrementalOptions, incremental};
pub use info::{Info, InfoOptions, info};
pub use manifest::manifest;
pub use map::{MapExtent, MapOptions, map};
pub use measure::{Measure, measure, measure_empty};
pub use open::OpenOptions;
pub use progress::{Event, Progress};
pub use rebase::{RebaseOptions, rebase};
pub use resize::{NewSize, Preallocation, ResizeOptions, Resized, resize};
pub use restore::restore;
pub use sink::TargetOptions;
pub use snapshot::{SnapshotChange, SnapshotList, change_snapshots, snapshots};
pub use source::Source;
