//! The run directory: what an experiment leaves behind, and all that a report reads.
//!
//! ```text
//! RUN/
//!   run.json             what was run, on what, and what each round holds: [`Run`]
//!   cells/ID/cell.json   an experiment's cell, as soon as it has ended: [`Cell`]
//!   cells/ID/timeline.json  what happened in the cell, and when: [`Timeline`]
//!   cells/ID/path.json   by which functions its requests have gone: [`RequestPath`]
//!   cells/ID/SIDE.folded what a guest's or the host's CPUs ran, by stack: [`Folded`]
//!   ROUND/               one folder a round, named as in run.json
//!     NAME.events        events by time, one clock a file: [`Stream`]
//!     NAME.log           text kept for people: consoles, QEMU's log
//! ```
//!
//! A report is a pure function of this directory. Times in event files are raw ticks of the clock
//! that `run.json` names for the file; converting them is the reader's work ([`Clocks`]), so that
//! a better conversion can be applied to an old run.
//!
//! A run may come from anywhere: what `run.json` names is checked when it is loaded, and nothing
//! outside the directory is read for it.

mod cell;
mod clocks;
mod error;
mod event;
pub mod evidence;
pub mod folded;
mod io_calls;
mod measure;
mod open;
mod path;
pub mod qemu_names;
mod run;
mod stream;
mod timeline;

pub use cell::{
    Beside, Cell, Expects, Experiment, Planned, Sheet, SheetRow, Shown, Trial, changed,
};
pub use clocks::{Clock, Clocks, GuestOffset, Pair};
pub use error::{Error, Result};
pub use event::{Event, Kind, MAX_ARGS, flags};
pub use folded::{Folded, Side};
pub use io_calls::{IO_CALLS, IoCall, io_call};
pub use measure::{Better, Measure, Series, Unit};
pub use path::{Between, Crossing, Handed, RequestPath, Stack};
pub use run::{
    Benchmark, BlockDevice, Disk, Environment, Extent, Machine, Role, Round, Run, RunKind,
    Scenario, StreamInfo, Thread, VERSION, now,
};
pub use stream::{Stream, StreamHeader, StreamWriter};
pub use timeline::{Span, Timeline};
