//! Handover state: what the parts of a disk (its storage, its filters, its trace) pass to the parts
//! of the disk that replaces it, in this process or in another one.
//!
//! ```text
//! predecessor:  early_state ──► ... serves requests, then stops ... final_state ──►            end
//! successor:    is created with the early state                       restore   (serves requests)
//! ```
//!
//! Files of the early state stay open on both sides until one side ends. The final state is that of
//! a moment at which nothing is in flight. If anything fails, the predecessor continues, so neither
//! step may change it.

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
pub struct PartState {
    /// Values of the state in JSON, with keys that the part chooses.
    pub values: Value,
    /// Files of the state, in the order in which the successor's part takes them.
    pub files: Vec<OwnedFd>,
    /// The successor must not start without this state, since its disk would differ.
    pub is_needed: bool,
}

impl PartState {
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
    fn check_handover(&self) -> Result<(), String> {
        Ok(())
    }

    /// Returns the state with which the successor's part is created, while requests continue. None:
    /// the successor's options are sufficient.
    fn early_state(&self) -> io::Result<Option<PartState>> {
        Ok(None)
    }

    /// Returns the remaining state, when nothing is in flight.
    fn final_state(&self) -> io::Result<Option<PartState>> {
        Ok(None)
    }

    /// Restores the state that the predecessor's part returned from `final_state`. No request has
    /// arrived yet.
    fn restore(&self, _left: PartState) -> Result<(), String> {
        Ok(())
    }

    /// Finishes this part's remaining work before `deadline`, once a successor has taken over.
    fn end(&self, _deadline: Instant) {}
}

/// Handover state of all parts of a disk, by name. Clones share the same state.
#[derive(Clone, Debug, Default)]
pub struct HandoverState(Arc<Mutex<BTreeMap<String, PartState>>>);

impl HandoverState {
    /// Stores the state of the part of this name, in place of an earlier state.
    pub fn put(&self, part: &str, left: PartState) {
        self.0.lock().insert(part.to_owned(), left);
    }

    /// Takes the state of the part of this name. Returns `None` if the part has no state.
    pub fn take(&self, part: &str) -> Option<PartState> {
        self.0.lock().remove(part)
    }

    /// Takes the states of all parts, by name.
    pub fn take_all(&self) -> BTreeMap<String, PartState> {
        std::mem::take(&mut *self.0.lock())
    }

    /// Returns whether no part has a state that has not been taken.
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
    /// Adds a part. The successor's part of the same name gets its state.
    pub fn add(&mut self, name: impl Into<String>, part: Arc<dyn Part>) {
        self.0.push((name.into(), part));
    }

    /// See [`Part::check_handover`].
    pub fn check_handover(&self) -> Result<(), String> {
        self.0
            .iter()
            .try_for_each(|(_, part)| part.check_handover())
    }

    /// See [`Part::early_state`]. The error is one line.
    pub fn early_state(&self) -> Result<HandoverState, String> {
        self.collect(|part| part.early_state())
    }

    /// See [`Part::final_state`]. The error is one line.
    pub fn final_state(&self) -> Result<HandoverState, String> {
        self.collect(|part| part.final_state())
    }

    fn collect(
        &self,
        what: impl Fn(&dyn Part) -> io::Result<Option<PartState>>,
    ) -> Result<HandoverState, String> {
        let handover_state = HandoverState::default();
        for (name, part) in &self.0 {
            let left = what(&**part);
            let left = left.map_err(|error| {
                format!(
                    "the state of {name} cannot be handed over: {}",
                    cause(error)
                )
            })?;
            left.into_iter()
                .for_each(|left| handover_state.put(name, left));
        }
        Ok(handover_state)
    }

    /// See [`Part::restore`].
    pub fn restore(&self, handover_state: &HandoverState) -> Result<(), String> {
        for (name, part) in &self.0 {
            let left = handover_state.take(name);
            left.map_or(Ok(()), |left| part.restore(left))
                .map_err(|problem| format!("{name}: {problem}"))?;
        }
        handover_state.check_taken()
    }

    /// See [`Part::end`].
    pub fn end(&self, deadline: Instant) {
        self.0.iter().for_each(|(_, part)| part.end(deadline));
    }
}
