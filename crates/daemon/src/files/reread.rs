//! Reads the whole configuration again while a server runs.

use super::config::read_config;
use super::keeper::Keeper;
use fathom_control::Found;
use fathom_core::{ThreadKind, thread_starts};
use fathom_host::Error;
use fathom_host::options::ServeOptions;
use fathom_host::signals::LeftToThisThread;
use std::io;
use std::path::PathBuf;
use std::thread;

/// The configuration as it is now.
pub struct Reread {
    pub options: Result<ServeOptions, Error>,
    /// The definitions of persistent disks.
    pub kept: Found,
}

/// Reads the configuration on another thread, and calls `done` there.
pub fn reread(
    config: PathBuf,
    keeper: Option<&Keeper>,
    done: impl FnOnce(Reread) + Send + 'static,
) -> io::Result<()> {
    let read = move |kept| {
        let options = read_config(&config);
        done(Reread { options, kept });
    };
    match keeper {
        Some(keeper) => keeper.read(Box::new(read)),
        None => {
            let _signals = LeftToThisThread::begin();
            let builder = thread::Builder::new().name("reload".into());
            builder.spawn(move || {
                thread_starts(ThreadKind::General);
                read(Found::default());
            })?;
        }
    }
    Ok(())
}
