//! Runs asynchronous work at the same time as a job: network requests, hashing and compression.

use crate::error::{Error, io_error};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Runs work with results of type `T`. Dropping it cancels work in progress.
pub(crate) struct Background<T> {
    runtime: Option<Runtime>,
    sender: Sender<T>,
    done: Receiver<T>,
}

impl<T: Send + 'static> Background<T> {
    pub(crate) fn new() -> Result<Background<T>, Error> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("background")
            .enable_all()
            .build();
        let failed = io_error(Path::new("threads"), "cannot start");
        let (sender, done) = channel();
        Ok(Background {
            runtime: Some(runtime.map_err(failed)?),
            sender,
            done,
        })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("until it is dropped")
    }

    /// Runs a future to completion and returns its result.
    pub(crate) fn run<U>(&self, work: impl Future<Output = U>) -> U {
        self.runtime().block_on(work)
    }

    /// Starts a future whose result is returned by [`Background::wait_for`].
    pub(crate) fn begin(&self, work: impl Future<Output = T> + Send + 'static) {
        let sender = self.sender.clone();
        self.runtime().spawn(async move {
            // Sending fails only if the receiver is gone, and then the result is not needed.
            let _ = sender.send(work.await);
        });
    }

    /// Waits for the next result. Returns `None` after `time`.
    pub(crate) fn wait_for(&self, time: Duration) -> Option<T> {
        self.done.recv_timeout(time).ok()
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Pauses between attempts, in seconds. A server that stays unreachable longer fails the job.
const PAUSES: [u64; 3] = [1, 2, 4];

/// Returns the pause before the next attempt, if this attempt failed with a transient error and may
/// be repeated.
pub(crate) fn pause_after<T>(
    outcome: &Result<T, fathom_archive::Error>,
    attempt: usize,
) -> Option<Duration> {
    let may_pass = outcome
        .as_ref()
        .is_err_and(fathom_archive::Error::is_transient);
    let pause = PAUSES.get(attempt).filter(|_| may_pass);
    pause.map(|seconds| Duration::from_secs(*seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_archive::Error as ArchiveError;

    #[test]
    fn what_may_pass_is_tried_again_for_some_time() {
        let what = || "s3://bucket/x".to_owned();
        let problem = || "no answer in time".to_owned();
        let passing = Err::<(), _>(ArchiveError::Unreachable {
            what: what(),
            problem: problem(),
        });
        let seconds = (0..4).map(|attempt| pause_after(&passing, attempt).map(|p| p.as_secs()));
        assert_eq!(Vec::from_iter(seconds), [Some(1), Some(2), Some(4), None]);
        let lasting = Err::<(), _>(ArchiveError::NotFound { what: what() });
        assert_eq!(pause_after(&lasting, 0), None);
        assert_eq!(pause_after(&Ok(()), 0), None);
    }

    #[test]
    fn what_does_not_end_is_given_up() {
        let background = Background::new().unwrap();
        background.begin(async { 1 });
        background.begin(std::future::pending());
        assert_eq!(background.wait_for(fathom_testing::PATIENCE), Some(1));
        assert_eq!(background.wait_for(Duration::ZERO), None);
        assert_eq!(background.run(async { 2 }), 2);
    }
}
