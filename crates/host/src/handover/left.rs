//! What the parts of a disk lend and leave, on its way from one process to another.

use fathom_core::{Left, Legacy};
use fathom_sockets::Descriptors;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;

/// One disk's, by the names of its parts; numbers of files are those of a list beside it.
pub type LeftState = BTreeMap<String, PartState>;

#[derive(Debug, Serialize, Deserialize)]
pub struct PartState {
    values: Value,
    files: Vec<usize>,
    /// A disk without that part would be another one.
    is_needed: bool,
}

/// Its files join the list.
pub fn describe(legacy: &Legacy, files: &mut Descriptors) -> io::Result<LeftState> {
    let mut one = |left: Left| -> io::Result<PartState> {
        let numbers = left.files.iter().map(|file| files.add(file));
        Ok(PartState {
            files: numbers.collect::<io::Result<_>>()?,
            values: left.values,
            is_needed: left.is_needed,
        })
    };
    let all = legacy.take_all().into_iter();
    all.map(|(part, left)| Ok((part, one(left)?))).collect()
}

/// It comes with these files. The error is one line.
pub fn taken(state: LeftState, files: &mut Descriptors) -> Result<Legacy, String> {
    let legacy = Legacy::default();
    for (
        part,
        PartState {
            values,
            files: numbers,
            is_needed,
        },
    ) in state
    {
        let own = numbers.into_iter().map(|number| files.take(number));
        let left = Left {
            values,
            files: own.collect::<Result<_, _>>()?,
            is_needed,
        };
        legacy.put(&part, left);
    }
    Ok(legacy)
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
        let legacy = Legacy::default();
        for (part, own) in [("a", &made[..1]), ("b", &made[1..])] {
            let files = own.iter().map(|file| file.try_clone().unwrap().into());
            legacy.put(
                part,
                Left {
                    values: json!({ "n": part }),
                    files: files.collect(),
                    is_needed: part == "b",
                },
            );
        }
        let mut files = Descriptors::default();
        files.add(&made[0]).unwrap();
        let text = serde_json::to_string(&describe(&legacy, &mut files).unwrap()).unwrap();
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
