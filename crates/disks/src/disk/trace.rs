//! The trace of a disk.

use super::Served;
use crate::tracer::Tracer;
use fathom_units::redacted;
use std::path::Path;

impl Served {
    pub fn trace(&self) -> Option<&Tracer> {
        self.trace.as_ref()
    }

    pub fn calibrate_trace(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.calibrate();
        }
    }

    /// Starts a trace, or without a file ends it.
    pub fn switch_trace(&mut self, file: Option<&Path>) -> Result<(), String> {
        match file {
            Some(path) => {
                let trace = self.start_trace(path);
                self.trace = Some(trace.map_err(|error| error.to_string())?);
                tracing::info!("tracing to {}", path.display());
            }
            None => {
                self.stop_trace();
                tracing::info!("tracing stopped");
            }
        }
        Ok(())
    }

    pub(super) fn start_trace(&self, path: &Path) -> Result<Tracer, fathom_trace::TraceError> {
        let tracer = Tracer::start(
            path,
            &redacted(&self.options.disk.location.to_string()),
            &self.stack.workers,
        )?;
        self.look();
        Ok(tracer)
    }

    fn stop_trace(&mut self) -> Option<Tracer> {
        self.stack.workers.iter().for_each(|w| w.trace(None));
        self.look();
        self.trace.take()
    }

    /// Stops the trace, because another process has truncated the trace file.
    pub fn drop_cut_trace(&mut self) {
        if let Some(trace) = self.stop_trace() {
            let path = trace.path().display();
            tracing::error!(
                "{path}: truncated by another process, so tracing has stopped; start a new trace \
                 with 'fathom trace --pid {} --on {path}'",
                std::process::id()
            );
        }
    }
}
