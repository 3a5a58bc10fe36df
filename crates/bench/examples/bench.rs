//! `fathom bench` on its own, without building the rest of the program.

use clap::Parser;

#[path = "../../cli/src/bench.rs"]
mod bench;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    bench: bench::BenchArgs,
}

fn main() -> std::process::ExitCode {
    match bench::run(Command::parse().bench) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
