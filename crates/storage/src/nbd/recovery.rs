//! Reconnects to a server after its connections were lost.

use super::halt::Halt;
use super::shared::Shared;
use super::unflushed::Unflushed;
use fathom_core::DiskError;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// First pause between two attempts, which doubles, and the longest.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Starts a thread that tries to reconnect until it succeeds.
pub(super) fn look_for(shared: &Arc<Shared>) {
    let (halt, weak) = (shared.halt.clone(), Arc::downgrade(shared));
    shared.connector.ask(move || recover(&weak, &halt));
}

/// Reconnects. All channels have released their connections.
fn recover(shared: &Weak<Shared>, halt: &Halt) {
    let mut said = String::new();
    let mut pause = match shared.upgrade().and_then(|shared| shared.links().hurry()) {
        None => PAUSE,
        // The server is found and lost again and again.
        Some(before) => {
            let pause = (2 * before).min(LONGEST_PAUSE);
            if !halt.pause(pause) {
                return;
            }
            pause
        }
    };
    while let Some(shared) = shared.upgrade() {
        let mut logs = std::mem::take(&mut shared.links().logs);
        logs.iter_mut()
            .for_each(|log| log.trim(shared.flushes.last()));
        match attempt(&shared, &logs, pause) {
            Ok(()) => return,
            Err(error) => {
                shared.links().logs.extend(logs);
                let text = error.to_string();
                if text != said {
                    tracing::error!("{text}");
                    said = text;
                }
            }
        }
        drop(shared);
        if !halt.pause(pause) {
            return;
        }
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Makes one attempt. `pause` is the pause before the next one.
fn attempt(shared: &Shared, logs: &[Unflushed], pause: Duration) -> Result<(), DiskError> {
    let mut greeted = shared.connect_again()?;
    let count = shared.write_again(&mut greeted, logs)?;
    let mut first = Some(greeted.ready());
    let mut sets = Vec::new();
    loop {
        let mut links = shared.links();
        if shared.is_halted() {
            return Ok(());
        }
        if links.members.len() <= sets.len() {
            links.give(sets, first, shared.export.replies);
            links.found = Some((Instant::now(), pause));
            break;
        }
        drop(links);
        sets.push(shared.connect_all(first.take())?);
    }
    let uri = shared.endpoint.uri();
    match count {
        0 => tracing::info!("{uri}: connected again; requests resume"),
        count => tracing::info!(
            "{uri}: connected again; {count} writes that were not flushed were repeated; \
             requests resume"
        ),
    }
    Ok(())
}
