//! What goes on beside a job: asking servers, hashing, compressing.

use crate::error::{Error, io_error};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Does work whose outcome is a `T`. When it is dropped, what is under way is given up.
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

    /// Waits for something that is needed now.
    pub(crate) fn run<U>(&self, work: impl Future<Output = U>) -> U {
        self.runtime().block_on(work)
    }

    /// Begins something, whose outcome comes by [`Background::wait_for`].
    pub(crate) fn begin(&self, work: impl Future<Output = T> + Send + 'static) {
        let sender = self.sender.clone();
        self.runtime().spawn(async move {
            // Who does not wait any more does not need it.
            let _ = sender.send(work.await);
        });
    }

    /// The next outcome, if one comes within that time.
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

/// Seconds to wait before another attempt; a server that is gone for longer ends a job.
const PAUSES: [u64; 3] = [1, 2, 4];

/// The pause after this attempt, if it has failed in a way that may pass.
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
