//! By which functions requests have gone to a device in a cell: `cells/ID/path.json`.
//!
//! Names come from whatever ran on a machine, and files from anywhere: readers bound both.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cell::Planned;
use crate::error::{Error, Result};
use crate::folded::Side;
use crate::open::replace;

const FILE: &str = "path.json";
/// Of a file.
const MAX_BYTES: u64 = 4 << 20;

/// A request's way, from the program that makes it to the last device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestPath {
    /// What a request takes as its maker sees it, ns on the mean.
    pub total_ns: Option<f64>,
    /// In the order in which a request comes by them.
    pub devices: Vec<Handed>,
    /// What happened meanwhile; what could not be counted is not there.
    pub between: Vec<Between>,
}

/// A device, and how requests have come to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Handed {
    pub side: Side,
    /// Its name on that side: `vda`, `eth0`.
    pub device: String,
    /// That were handed to it.
    pub requests: u64,
    /// From then until it had completed them, ns on the mean.
    pub device_ns: Option<f64>,
    /// Those that were seen most often, the first of them first; never none.
    pub stacks: Vec<Stack>,
}

/// A stack at the moment when a request is handed to a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stack {
    /// Requests.
    pub requests: u64,
    pub thread: String,
    /// From the outermost to the innermost, as [`frame`](crate::folded::frame) makes them.
    pub frames: Vec<String>,
}

/// What happened while requests were under way, for each of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Between {
    pub side: Side,
    pub what: Crossing,
    pub per_request: f64,
}

/// What a request's way is interrupted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Crossing {
    /// From the guest's code to the hypervisor.
    Exits,
    /// From a thread of those who carry the request to another one.
    Switches,
    /// Of a thread of theirs.
    WakeUps,
    Calls,
}

impl Crossing {
    /// All of them.
    pub const ALL: [Crossing; 4] = [
        Crossing::Exits,
        Crossing::Switches,
        Crossing::WakeUps,
        Crossing::Calls,
    ];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Crossing::Exits => "exits",
            Crossing::Switches => "switches",
            Crossing::WakeUps => "wake-ups",
            Crossing::Calls => "calls",
        }
    }
}

impl RequestPath {
    /// Writes it into a cell's folder.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        replace(&folder.join(FILE), self)
    }

    /// Reads what a cell has left; `None` if that is nothing. All figures are numbers, none is
    /// negative, and each device has a stack.
    ///
    /// # Errors
    /// When it is damaged, or is not a file of that directory.
    pub fn load(run: &Path, planned: &Planned) -> Result<Option<RequestPath>> {
        match planned.read::<RequestPath>(run, FILE, MAX_BYTES)? {
            Some(read) if !read.is_sound() => {
                let path = planned.folder(run).join(FILE);
                Err(Error::unusable(
                    &path,
                    "damaged: a figure or a stack that is none",
                ))
            }
            read => Ok(read),
        }
    }

    fn is_sound(&self) -> bool {
        let times = self.devices.iter().filter_map(|one| one.device_ns);
        let counts = self.between.iter().map(|one| one.per_request);
        let mut figures = times.chain(counts).chain(self.total_ns);
        figures.all(|figure| figure.is_finite() && figure >= 0.0)
            && self.devices.iter().all(|one| !one.stacks.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_was_written_is_read_and_what_is_damaged_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let planned = Planned {
            id: "1-1".into(),
            ..Planned::default()
        };
        let load = || RequestPath::load(dir.path(), &planned);
        assert_eq!(load().unwrap(), None);
        let folder = planned.folder(dir.path());
        fs::create_dir_all(&folder).unwrap();
        let path = RequestPath {
            total_ns: Some(1000.0),
            devices: vec![Handed {
                side: Side::Guest,
                device: "vda".into(),
                requests: 2,
                device_ns: Some(800.5),
                stacks: vec![Stack {
                    requests: 2,
                    thread: "fio".into(),
                    frames: vec!["virtio_queue_rq [virtio_blk.ko]".into()],
                }],
            }],
            between: vec![Between {
                side: Side::Host,
                what: Crossing::WakeUps,
                per_request: 1.5,
            }],
        };
        path.save(&folder).unwrap();
        assert_eq!(load().unwrap(), Some(path));
        let good = fs::read_to_string(folder.join(FILE)).unwrap();
        let told: serde_json::Value = serde_json::from_str(&good).unwrap();
        assert_eq!(told["between"][0]["what"], "wake-ups");
        assert_eq!(told["devices"][0]["side"], "guest");
        for (field, bad) in [
            ("/total_ns", "-1"),
            ("/devices/0/device_ns", "1e999"),
            ("/between/0/per_request", "-0.5"),
            ("/devices/0/stacks", "[]"),
            ("/devices/0/side", "\"both\""),
        ] {
            let mut damaged = told.clone();
            *damaged.pointer_mut(field).unwrap() = "HERE".into();
            let text = damaged.to_string().replace("\"HERE\"", bad);
            fs::write(folder.join(FILE), text).unwrap();
            assert!(load().is_err(), "{field}: {bad}");
        }
    }
}
