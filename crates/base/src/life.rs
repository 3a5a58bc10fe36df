//! The life cycle of a keeper, which starts with its first user and ends some time after the last
//! one.

use crate::cache::boot_id;
use crate::cage;
use crate::directory;
use crate::keeper::Keeper;
use crate::users::{Event, accept, watched};
use fathom_storage::cached::Terms;
use fathom_storage::cached::finder::{dial, open_place, socket_in};
use fathom_storage::cached::wire::{self, FromKeeper};
use fathom_units::cause;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::channel;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::timeout;

/// Maximum number of queued events; further senders wait.
const EVENTS: usize = 256;
/// Maximum number of threads for blocking work: writes and syncs.
const THREADS: usize = 6;
/// Time that the previous keeper has to end.
const TURN: Duration = Duration::from_secs(5);
/// Time without new users after which a keeper that cannot open its image ends.
const SORRY: Duration = Duration::from_secs(1);

/// The lock and the socket of an image's only keeper.
struct Post {
    listener: OwnedFd,
    boot: String,
    _lock: File,
}

/// Runs the keeper of an image. Returns after the image has had no users for a while.
///
/// Returns at once if another process is the image's keeper. The error is one line.
pub fn keep(terms: Terms) -> Result<(), String> {
    let place = terms.place();
    let failed = |error: io::Error| {
        format!(
            "cannot use the cache at {}: {}",
            place.display(),
            cause(error)
        )
    };
    let Some(post) = take(&place).map_err(failed)? else {
        return Ok(());
    };
    cage::shut_in(&terms).map_err(failed)?;
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime
        .enable_all()
        .max_blocking_threads(THREADS)
        .build()
        .map_err(failed)?;
    let served = LocalSet::new().block_on(&runtime, serve(terms, post));
    // Does not wait for blocking work on a remote that does not respond.
    runtime.shutdown_background();
    served
}

/// Acquires the lock and creates the socket. Returns `None` if the image already has a keeper.
fn take(place: &Path) -> io::Result<Option<Post>> {
    let deadline = Instant::now() + TURN;
    let lock = loop {
        // The previous keeper or a removal of the cache may have removed the directory.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(place)?;
        match directory::lock(place)? {
            Some(lock) => break lock,
            None if dial(place).is_ok() || Instant::now() > deadline => return Ok(None),
            None => sleep(Duration::from_millis(20)),
        }
    };
    // Removes temporary files of a keeper that was killed.
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".tmp") {
            fs::remove_file(entry.path())?;
        }
    }
    let dir = open_place(place)?;
    let address = socket_in(&dir)?;
    let _ = fs::remove_file(place.join("socket"));
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(kind.0, kind.1, flags, None)?;
    bind(&listener, &address)?;
    listen(&listener, 128)?;
    let boot = boot_id()?;
    Ok(Some(Post {
        listener,
        boot,
        _lock: lock,
    }))
}

async fn serve(terms: Terms, post: Post) -> Result<(), String> {
    let socket = terms.place().join("socket");
    let (events, mut happened) = channel(EVENTS);
    let listener = watched(post.listener);
    let listener = listener.map_err(cause)?;
    let accepting = spawn_local(accept(listener, events.clone()));
    let keeper = Keeper::open(terms, &post.boot, events).await;
    let mut keeper = match keeper {
        Ok(keeper) => keeper,
        Err(problem) => {
            let mut is_told = false;
            while let Ok(Some(event)) = timeout(SORRY, happened.recv()).await {
                if let Event::Came(socket) = event {
                    is_told |=
                        wire::send(&socket, &FromKeeper::Refused(problem.clone()), &[]).is_ok();
                }
            }
            // The users that received the error report it.
            return if is_told { Ok(()) } else { Err(problem) };
        }
    };
    keeper.run(&mut happened).await;
    // New users cannot connect any more. A new user therefore starts the next keeper, which waits
    // for the lock.
    let _ = fs::remove_file(&socket);
    accepting.abort();
    let _ = accepting.await;
    keeper.finish();
    Ok(())
}
