//! Handover state: what the parts of a disk (its storage, its filters, its trace) pass to the parts
//! of the disk that replaces it, in this process or in another one.
//!
//! ```text
//! predecessor:  lend ──► ... serves requests, then stops ... leave ──►          end
//! successor:    is created with the lent state                         inherit   (serves requests)
//! ```
//!
//! Files that are lent stay open on both sides until one side ends. The state that `leave` returns
//! is that of a moment at which nothing is in flight. If anything fails, the predecessor continues,
//! so neither step may change it.

use fathom_units::cause;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Handover state of one part.
#[derive(Debug, Default)]
pub struct Left {
    pub values: Value,
    pub files: Vec<OwnedFd>,
    /// The successor must not start without this state, since its disk would differ.
    pub is_needed: bool,
}

impl Left {
    /// Takes the next file. The error is one line.
    pub fn take_file(&mut self) -> Result<OwnedFd, String> {
        let file = (!self.files.is_empty()).then(|| self.files.remove(0));
        file.ok_or_else(|| "the predecessor's saved state lacks a file".into())
    }

    /// Returns the value `name`. The error is one line.
    pub fn number(&self, name: &str) -> Result<u64, String> {
        let number = self.values[name].as_u64();
        number.ok_or_else(|| format!("the predecessor's saved state lacks '{name}'"))
    }
}

/// A part of a disk that takes part in a handover.
pub trait Part: Send + Sync {
    /// Fails, with a one-line reason, if no successor could continue from this part.
    fn may_go(&self) -> Result<(), String> {
        Ok(())
    }

    /// Returns the state with which the successor's part is created, while requests continue. None:
    /// the successor's options are sufficient.
    fn lend(&self) -> io::Result<Option<Left>> {
        Ok(None)
    }

    /// Returns the remaining state, when nothing is in flight.
    fn leave(&self) -> io::Result<Option<Left>> {
        Ok(None)
    }

    /// Restores the state that the predecessor's part returned from `leave`. No request has arrived
    /// yet.
    fn inherit(&self, _left: Left) -> Result<(), String> {
        Ok(())
    }

    /// Finishes this part's remaining work before `deadline`, once a successor has taken over.
    fn end(&self, _deadline: Instant) {}
}

/// Handover state of all parts of a disk, by name. Clones share the same state.
#[derive(Clone, Debug, Default)]
pub struct Legacy(Arc<Mutex<BTreeMap<String, Left>>>);

impl Legacy {
    pub fn put(&self, part: &str, left: Left) {
        self.0.lock().insert(part.to_owned(), left);
    }

    pub fn take(&self, part: &str) -> Option<Left> {
        self.0.lock().remove(part)
    }

    pub fn take_all(&self) -> BTreeMap<String, Left> {
        std::mem::take(&mut *self.0.lock())
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Fails, with a one-line reason, if a part that is needed was not taken.
    pub fn check_taken(&self) -> Result<(), String> {
        let needed = self
            .0
            .lock()
            .iter()
            .find(|(_, left)| left.is_needed)
            .map(|(name, _)| name.clone());
        match needed {
            Some(part) => Err(format!("the saved state of {part} would be lost")),
            None => Ok(()),
        }
    }
}

/// The parts of a disk with handover state, by name.
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
