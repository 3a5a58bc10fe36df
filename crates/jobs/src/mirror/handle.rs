//! The handle of a mirror.

use super::follower::Follower;
use super::noting::{Noting, end_of};
use super::terms::{Target, Terms};
use crate::following::{ABANDONED, Following, Shared, Tell};
use crate::source::{InUse, Source};
use fathom_core::{Changes, DiskError, ThreadKind, thread_starts};
use fathom_units::{Size, cause};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// A mirror of a disk.
#[derive(Clone)]
pub struct Mirror {
    /// Handle to the job, which reports its progress and ends it.
    pub following: Following,
    size: u64,
}

impl Mirror {
    /// Starts a mirror. `over` is called when the mirror is over. May block.
    ///
    /// # Errors
    /// A message for the user; both disks are unchanged.
    pub fn start(
        source: Source,
        to: Target,
        terms: Terms,
        tell: Tell,
        over: Box<dyn FnOnce() + Send>,
    ) -> Result<Mirror, String> {
        let target = to.disk()?;
        let (size, room) = (source.disk.info().size, target.info());
        if room.read_only {
            return Err("the target is read-only".into());
        }
        if room.size != size {
            return Err(format!(
                "the target has {}, the disk {}; both must have the same size",
                Size(room.size),
                Size(size)
            ));
        }
        if room.block_size > source.disk.info().block_size {
            return Err(format!(
                "the target's blocks of {} bytes are larger than those that the disk offers to \
                 its users",
                room.block_size
            ));
        }
        let error = |error: DiskError| error.to_string();
        let shared = Shared::new(matches!(to, Target::Below(_)), terms.rate, &tell);
        // Activating another target may block: its lock is taken, or its file system does not
        // respond. A front-end that disconnects from the source waits for all users of the source.
        // Therefore the source is not activated yet. A target below the source is activated
        // together with it.
        let early = match &to {
            Target::Other(_) => Some(InUse::new(&target).map_err(error)?),
            Target::Below(_) => None,
        };
        shared.take(&source.disk).map_err(error)?;
        let taken = match early {
            Some(taken) => taken,
            None => InUse::new(&target).map_err(error)?,
        };
        let noted = Arc::new(Changes::new(size));
        let noting = Noting::begin(&source, &noted)?;
        let brake = noting.brake.clone();
        let noting = Arc::new(Mutex::new(Some(noting)));
        if let Target::Other(other) = &to {
            let noting = noting.clone();
            let release = Box::new(move || drop(end_of(&noting)));
            shared.can_be_abandoned(other.halt.clone(), release, ABANDONED);
        }
        shared.state().status.left = size;
        let follower = Follower {
            changes_by_others: source.tap.changes_by_others(),
            source,
            to,
            target,
            terms,
            noted,
            todo: Changes::new(size),
            noting,
            brake,
            shared: shared.clone(),
            tell,
            cursor: 0,
            has_begun: false,
            has_come_round: false,
        };
        let thread = std::thread::Builder::new().name("mirror".into());
        let thread = thread.spawn(move || {
            thread_starts(ThreadKind::General);
            follower.run(taken);
            over();
        });
        thread.map_err(|error| format!("cannot start a thread: {}", cause(error)))?;
        Ok(Mirror {
            following: Following { shared },
            size,
        })
    }

    /// Returns the size of both disks in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Tells the mirror to copy the remaining data when the virtual machine disconnects.
    pub fn begin_finish(&self) {
        self.following.shared.finish(false);
    }

    /// Copies the remaining data after the caller has stopped all changes of the disk.
    ///
    /// On success the target is identical, durable and released.
    ///
    /// # Errors
    /// A message for the user: the mirror has failed, or the deadline has passed. In the latter
    /// case copying continues.
    pub fn finish(&self, deadline: Instant) -> Result<(), String> {
        self.following.shared.finish(true);
        match self.following.shared.wait(deadline) {
            false => Err("the remaining data could not be copied in time".into()),
            true => self.following.status().problem.map_or(Ok(()), Err),
        }
    }

    /// Cancels [`Mirror::finish`] or [`Mirror::begin_finish`], unless the mirror has finished.
    pub fn go_on(&self) {
        self.following.shared.go_on();
    }
}
