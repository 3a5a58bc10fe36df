//! Archives and objects in all kinds of places.

mod archive;
mod object;
mod server;
mod strangers;

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(future)
}
