//! The option that selects how I/O is done.

use clap::Args;
use fathom_spec::values;
use fathom_storage::EngineKind;

#[derive(Args, Debug)]
pub struct AioArg {
    /// Kind of I/O on files and devices
    #[arg(long, value_name = "ENGINE", default_value = "io_uring", value_parser = values::engine())]
    pub aio: EngineKind,
}
