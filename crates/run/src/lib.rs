//! The run directory: the results of an experiment, and the only input of a report.
//!
//! ```text
//! RUN/
//!   run.json             the work, the machines, and the contents of each round: [`Run`]
//!   cells/ID/cell.json   an experiment's cell, as soon as it has ended: [`Cell`]
//!   cells/ID/timeline.json  the activities in the cell over time: [`Timeline`]
//!   cells/ID/path.json   the functions on the path of its requests: [`RequestPath`]
//!   cells/ID/SIDE.folded sampled stacks of the guest's or the host's CPUs: [`Folded`]
//!   ROUND/               one folder per round, named as in run.json
//!     NAME.events        events in order of time, one clock per file: [`Stream`]
//!     NAME.log           text for users: consoles, QEMU's log
//! ```
//!
//! A report is a pure function of this directory. Times in event files are raw ticks of the clock
//! that `run.json` names for the file. The reader converts them ([`Clocks`]), so that an improved
//! conversion can be applied to an old run.
//!
//! A run directory is not trusted: names in `run.json` are checked when it is loaded, and nothing
//! outside the directory is read.

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
