//! Shows the progress of a job, and stops the job at a signal.

use clap::Args;
use fathom_img::Event;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Options for the output of a job.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Show progress even if standard error is not a terminal
    ///
    /// Progress is a bar on a terminal, and lines elsewhere.
    #[arg(short, long, help_heading = "Output")]
    progress: bool,
    /// Print only errors, even with --progress
    #[arg(short, long, help_heading = "Output")]
    quiet: bool,
    /// Print events as JSON, one object per line
    #[arg(long, conflicts_with_all = ["progress", "quiet"], help_heading = "Output")]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Nothing,
    Bar,
    Lines,
    Json,
}

/// Prints the events of a job.
pub(crate) struct Watch {
    form: Form,
    quiet: bool,
    /// The last percentage that was printed.
    shown: Option<u64>,
    /// Whether the cursor is on the line of the bar.
    in_bar: bool,
}

/// Width of the bar in columns.
const WIDTH: usize = 40;

impl WatchArgs {
    pub(crate) fn quiet(&self) -> bool {
        self.quiet
    }

    pub(crate) fn json(&self) -> bool {
        self.json
    }

    pub(crate) fn watch(&self) -> Watch {
        let form = match std::io::stderr().is_terminal() {
            _ if self.json => Form::Json,
            _ if self.quiet => Form::Nothing,
            true => Form::Bar,
            false if self.progress => Form::Lines,
            false => Form::Nothing,
        };
        Watch {
            form,
            quiet: self.quiet,
            shown: None,
            in_bar: false,
        }
    }
}

impl Watch {
    pub(crate) fn event(&mut self, event: Event) {
        match event {
            Event::Progress { done, total } => self.progress(done, total),
            Event::Warning(line) if self.form == Form::Json => {
                json_line(&json!({"event": "warning", "message": line}));
            }
            Event::Warning(line) => {
                self.leave_bar();
                if !self.quiet {
                    eprintln!("fathom: {}", fathom_img::shown(&line));
                }
            }
        }
    }

    fn progress(&mut self, done: u64, total: u64) {
        let percent = (done * 100).checked_div(total).unwrap_or(100);
        match self.form {
            Form::Nothing => {}
            Form::Json => {
                json_line(&json!({"event": "progress", "done": done, "total": total}));
            }
            Form::Bar => {
                let full = percent as usize * WIDTH / 100;
                let bar: String = "#".repeat(full) + &" ".repeat(WIDTH - full);
                eprint!("\r[{bar}] {percent:3} %");
                let _ = std::io::stderr().flush();
                self.in_bar = true;
            }
            Form::Lines => {
                let step = percent / 10 * 10;
                if self.shown != Some(step) {
                    eprintln!("{step} %");
                    self.shown = Some(step);
                }
            }
        }
    }

    /// Ends the line of the bar at the end of the job.
    pub(crate) fn end(&mut self) {
        self.leave_bar();
    }

    fn leave_bar(&mut self) {
        if std::mem::take(&mut self.in_bar) {
            eprintln!();
        }
    }
}

/// Prints a line of JSON. The job continues if the reader has closed standard output.
pub(crate) fn json_line(value: &serde_json::Value) {
    let _ = writeln!(std::io::stdout(), "{value}");
}

/// Returns a flag that the first SIGINT or SIGTERM sets. A second signal ends the process.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// Runs a job, and prints its progress and its outcome.
pub(crate) fn watched<T>(
    args: &WatchArgs,
    job: impl FnOnce(&mut fathom_img::Progress<'_>) -> Result<T, fathom_img::Error>,
) -> anyhow::Result<T> {
    watched_telling(args, job, |_| json!({}))
}

/// Runs a job like [`watched`]. `told` returns the fields of the last event.
pub(crate) fn watched_telling<T>(
    args: &WatchArgs,
    job: impl FnOnce(&mut fathom_img::Progress<'_>) -> Result<T, fathom_img::Error>,
    told: impl FnOnce(&T) -> serde_json::Value,
) -> anyhow::Result<T> {
    let stop = stop_flag()?;
    let done = watched_until(args, &stop, job);
    tell_outcome(args, done.as_ref().map(told));
    if let Err(error @ fathom_img::Error::Interrupted) = &done {
        interrupted(error);
    }
    Ok(done?)
}

/// Prints the error and exits with the status of an interrupted command.
pub(crate) fn interrupted(error: &dyn std::fmt::Display) -> ! {
    eprintln!("fathom: {error}");
    std::process::exit(130);
}

/// Runs a job until `stop` is set, and prints its progress, but not its outcome.
pub(crate) fn watched_until<T>(
    args: &WatchArgs,
    stop: &AtomicBool,
    job: impl FnOnce(&mut fathom_img::Progress<'_>) -> Result<T, fathom_img::Error>,
) -> Result<T, fathom_img::Error> {
    let mut watch = args.watch();
    let mut watcher = |event| watch.event(event);
    let done = job(&mut fathom_img::Progress::new(&mut watcher, stop));
    watch.end();
    done
}

/// Prints the last event of a job: its outcome.
pub(crate) fn tell_outcome(
    args: &WatchArgs,
    outcome: Result<serde_json::Value, impl std::fmt::Display>,
) {
    if args.json() {
        json_line(&match outcome {
            Ok(mut end) => {
                end["event"] = json!("end");
                end
            }
            Err(error) => json!({"event": "error", "message": error.to_string()}),
        });
    }
}
