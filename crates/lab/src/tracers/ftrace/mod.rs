//! Decodes kernel traces. The binary pages of the ring buffers are decoded by each event's `format`
//! file. The text of the trace is parsed only if the pages cannot be read.

#[cfg(test)]
mod captures;
mod drain;
mod format;
mod page;
mod pages;
mod plan;
mod recorder;
mod text;

pub use format::{Field, Format, Layout, Shape};
pub use page::{Page, Record};
pub use pages::{CpuPages, Selection, Written, write};
pub use plan::{Plan, Source, Symbols, flags_of};
pub use recorder::{Mode, Recorder, Side};

pub use text::{TextEvents, TextReader, events as text_events};

pub(crate) use pages::unwritten;
