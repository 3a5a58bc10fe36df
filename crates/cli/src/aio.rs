//! The option that all who do I/O have.

use clap::Args;
use fathom_storage::EngineKind;

#[derive(Args, Debug)]
pub struct AioArg {
    /// How I/O is done: io_uring, native (Linux AIO) or threads
    #[arg(long, value_name = "ENGINE", default_value = "io_uring")]
    pub aio: EngineKind,
}
