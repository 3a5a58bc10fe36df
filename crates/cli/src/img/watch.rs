//! What a user sees of a job under way, and how it is ended early.

use clap::Args;
use fathom_img::Event;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// How a job tells how far it is.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Show how far it is, in lines if standard error is no terminal
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors, even with -p
    #[arg(short, long)]
    quiet: bool,
    /// Print events as JSON, one a line
    #[arg(long, conflicts_with_all = ["progress", "quiet"])]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Nothing,
    Bar,
    Lines,
    Json,
}

/// Writes down events.
pub(crate) struct Watch {
    form: Form,
    quiet: bool,
    /// The last percentage shown.
    shown: Option<u64>,
    /// The cursor is in the bar.
    in_bar: bool,
}

/// Columns of the bar.
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

    /// The job has ended.
    pub(crate) fn end(&mut self) {
        self.leave_bar();
    }

    fn leave_bar(&mut self) {
        if std::mem::take(&mut self.in_bar) {
            eprintln!();
        }
    }
}

/// A reader that has gone does not end the job.
pub(crate) fn json_line(value: &serde_json::Value) {
    let _ = writeln!(std::io::stdout(), "{value}");
}

/// Set by the first SIGINT or SIGTERM; the second ends the process at once.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// Does a job while the user watches; the outcome is told as the form says.
pub(crate) fn watched<T>(
    args: &WatchArgs,
    job: impl FnOnce(&mut fathom_img::Progress<'_>) -> Result<T, fathom_img::Error>,
) -> anyhow::Result<T> {
    watched_telling(args, job, |_| json!({}))
}

/// Likewise; `told` is what the last event has to say of it.
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

/// Ends the process as one that was interrupted.
pub(crate) fn interrupted(error: &dyn std::fmt::Display) -> ! {
    eprintln!("fathom: {error}");
    std::process::exit(130);
}

/// Does a job while the user watches, until `stop` is set. What has become of it is not told.
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

/// What has become of a job, and what there is to say of it: the last event.
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
