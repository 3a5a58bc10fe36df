//! `fathom guest`: what runs inside a guest.

use clap::{Args, Subcommand};

use crate::guest_run;

/// Record a guest's layers, from inside
#[derive(Debug, Args)]
pub struct GuestArgs {
    #[command(subcommand)]
    command: GuestCommand,
}

#[derive(Debug, Subcommand)]
enum GuestCommand {
    /// A round's half in the guest, started by `fathom lab run wiki`
    #[command(hide = true)]
    Run(guest_run::RunArgs),
}

/// Runs the command.
pub fn run(args: GuestArgs) -> anyhow::Result<()> {
    match args.command {
        GuestCommand::Run(args) => guest_run::run(args),
    }
}
