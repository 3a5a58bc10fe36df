//! The states of a disk's parts, as one process sends them to another.

use fathom_core::{HandoverState, PartState};
use fathom_sockets::Descriptors;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;

/// States of a disk's parts, by the names of the parts.
pub type PartRecords = BTreeMap<String, PartRecord>;

#[derive(Debug, Serialize, Deserialize)]
pub struct PartRecord {
    values: Value,
    /// Indices of its files in the list that accompanies the message.
    files: Vec<usize>,
    /// Whether the disk would differ without this state.
    is_needed: bool,
}

/// Describes the state of a disk's parts, and adds its files to `files`.
pub fn describe(
    handover_state: &HandoverState,
    files: &mut Descriptors,
) -> io::Result<PartRecords> {
    let mut one = |left: PartState| -> io::Result<PartRecord> {
        let numbers = left.files.iter().map(|file| files.add(file));
        Ok(PartRecord {
            files: numbers.collect::<io::Result<_>>()?,
            values: left.values,
            is_needed: left.is_needed,
        })
    };
    let all = handover_state.take_all().into_iter();
    all.map(|(part, left)| Ok((part, one(left)?))).collect()
}

/// Returns the described state, with its files. The error is one line.
pub fn taken(state: PartRecords, files: &mut Descriptors) -> Result<HandoverState, String> {
    let handover_state = HandoverState::default();
    for (
        part,
        PartRecord {
            values,
            files: numbers,
            is_needed,
        },
    ) in state
    {
        let own = numbers.into_iter().map(|number| files.take(number));
        let left = PartState {
            values,
            files: own.collect::<Result<_, _>>()?,
            is_needed,
        };
        handover_state.put(&part, left);
    }
    Ok(handover_state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn what_is_left_arrives() {
        let of = |file: &File| file.metadata().unwrap().ino();
        let made: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let handover_state = HandoverState::default();
        for (part, own) in [("a", &made[..1]), ("b", &made[1..])] {
            let files = own.iter().map(|file| file.try_clone().unwrap().into());
            handover_state.put(
                part,
                PartState {
                    values: json!({ "n": part }),
                    files: files.collect(),
                    is_needed: part == "b",
                },
            );
        }
        let mut files = Descriptors::default();
        files.add(&made[0]).unwrap();
        let text = serde_json::to_string(&describe(&handover_state, &mut files).unwrap()).unwrap();
        let there = taken(serde_json::from_str(&text).unwrap(), &mut files).unwrap();
        let problem = there.check_taken().unwrap_err();
        assert!(problem.contains('b'), "{problem}");
        let (a, b) = (there.take("a").unwrap(), there.take("b").unwrap());
        assert_eq!((a.values["n"].as_str(), a.is_needed), (Some("a"), false));
        let found: Vec<_> = a
            .files
            .into_iter()
            .chain(b.files)
            .map(|file| of(&file.into()))
            .collect();
        assert_eq!(found, made.iter().map(of).collect::<Vec<_>>());
        assert!(there.check_taken().is_ok() && there.is_empty());
        assert!(
            taken(serde_json::from_str(&text).unwrap(), &mut files).is_err(),
            "used twice"
        );
    }
}
