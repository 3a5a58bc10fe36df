//! Runs blocking work on other threads.

/// Runs `work` on a thread for blocking work, so that it delays no other task.
pub(crate) async fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The runtime is shutting down, and the waiting task ends with it.
        Err(_) => std::future::pending().await,
    }
}
