//! What the parts of a disk (its storage, its filters, its trace) leave for those of the disk that takes
//! its place, in this process or in another one.
//!
//! ```text
//! old:  lend ──► ... requests go on, and then stand still ... leave ──►          end
//! new:           is made with that                                     inherit   (requests go on)
//! ```
//!
//! What is lent is open on both sides until one of them ends. What is left is how it was at an instant
//! at which nothing was in flight. Whatever fails, the old one goes on, so neither may change it.

use fathom_units::cause;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One part's.
#[derive(Debug, Default)]
pub struct Left {
    pub values: Value,
    pub files: Vec<OwnedFd>,
    /// Without it the disk would be another one.
    pub is_needed: bool,
}

impl Left {
    /// The file of that number. The error is one line.
    pub fn take_file(&mut self) -> Result<OwnedFd, String> {
        let file = (!self.files.is_empty()).then(|| self.files.remove(0));
        file.ok_or_else(|| "the predecessor's saved state lacks a file".into())
    }

    /// A value of that name.
    pub fn number(&self, name: &str) -> Result<u64, String> {
        let number = self.values[name].as_u64();
        number.ok_or_else(|| format!("the predecessor's saved state lacks '{name}'"))
    }
}

/// A part of a disk.
pub trait Part: Send + Sync {
    /// Refuses, in one line, if no successor could go on with it.
    fn may_go(&self) -> Result<(), String> {
        Ok(())
    }

    /// What the successor's part is made with; requests go on. None: what it is told by its options.
    fn lend(&self) -> io::Result<Option<Left>> {
        Ok(None)
    }

    /// Nothing is in flight: what else there is to know.
    fn leave(&self) -> io::Result<Option<Left>> {
        Ok(None)
    }

    /// That was left by the predecessor's. No request has come yet.
    fn inherit(&self, _left: Left) -> Result<(), String> {
        Ok(())
    }

    /// A successor goes on with it: what is still to be done here, until then.
    fn end(&self, _deadline: Instant) {}
}

/// What all parts of a disk lend or leave, by their names. Whoever has a copy has the same.
#[derive(Clone, Debug, Default)]
pub struct Legacy(Arc<Mutex<BTreeMap<String, Left>>>);

impl Legacy {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Left>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put(&self, part: &str, left: Left) {
        self.all().insert(part.to_owned(), left);
    }

    pub fn take(&self, part: &str) -> Option<Left> {
        self.all().remove(part)
    }

    pub fn take_all(&self) -> BTreeMap<String, Left> {
        std::mem::take(&mut *self.all())
    }

    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Refuses, in one line, what nobody has taken and is needed.
    pub fn check_taken(&self) -> Result<(), String> {
        let needed = self
            .all()
            .iter()
            .find(|(_, left)| left.is_needed)
            .map(|(name, _)| name.clone());
        match needed {
            Some(part) => Err(format!("the saved state of {part} would be lost")),
            None => Ok(()),
        }
    }
}

/// The parts of a disk that have something to leave, by their names.
#[derive(Clone, Default)]
pub struct Parts(Vec<(String, Arc<dyn Part>)>);

impl Parts {
    pub fn add(&mut self, name: impl Into<String>, part: Arc<dyn Part>) {
        self.0.push((name.into(), part));
    }

    /// See [`Part::may_go`].
    pub fn may_go(&self) -> Result<(), String> {
        self.0.iter().try_for_each(|(_, part)| part.may_go())
    }

    /// See [`Part::lend`]. The error is one line.
    pub fn lend(&self) -> Result<Legacy, String> {
        self.collect(|part| part.lend())
    }

    /// See [`Part::leave`]. The error is one line.
    pub fn leave(&self) -> Result<Legacy, String> {
        self.collect(|part| part.leave())
    }

    fn collect(
        &self,
        what: impl Fn(&dyn Part) -> io::Result<Option<Left>>,
    ) -> Result<Legacy, String> {
        let legacy = Legacy::default();
        for (name, part) in &self.0 {
            let left = what(&**part);
            let left = left.map_err(|error| {
                format!(
                    "the state of {name} cannot be handed over: {}",
                    cause(error)
                )
            })?;
            left.into_iter().for_each(|left| legacy.put(name, left));
        }
        Ok(legacy)
    }

    /// See [`Part::inherit`].
    pub fn inherit(&self, legacy: &Legacy) -> Result<(), String> {
        for (name, part) in &self.0 {
            let left = legacy.take(name);
            left.map_or(Ok(()), |left| part.inherit(left))
                .map_err(|problem| format!("{name}: {problem}"))?;
        }
        legacy.check_taken()
    }

    /// See [`Part::end`].
    pub fn end(&self, deadline: Instant) {
        self.0.iter().for_each(|(_, part)| part.end(deadline));
    }
}
