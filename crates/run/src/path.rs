//! The functions through which requests of a cell reach a device: `cells/ID/path.json`.
//!
//! Names and files are not trusted; readers limit the size of both.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cell::Planned;
use crate::error::{Error, Result};
use crate::folded::Side;
use crate::open::replace;

const FILE: &str = "path.json";
/// Maximum size of a file in bytes.
const MAX_BYTES: u64 = 4 << 20;

/// The path of a request from the program that issues it to the last device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestPath {
    /// Mean time of a request in ns, as the issuing program measures it.
    pub total_ns: Option<f64>,
    /// The devices in the order in which a request reaches them.
    pub devices: Vec<Handed>,
    /// Events on the way; events that could not be counted are missing.
    pub between: Vec<Between>,
}

/// A device, and how requests reach it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Handed {
    /// Machine that issues the requests to the device.
    pub side: Side,
    /// Name of the device on that side: `vda`, `eth0`.
    pub device: String,
    /// Number of requests issued to the device.
    pub requests: u64,
    /// Mean time in ns from the issue to the completion by the device.
    pub device_ns: Option<f64>,
    /// The most frequent stacks, in descending order; never empty.
    pub stacks: Vec<Stack>,
}

/// A stack at the moment when a request is issued to a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stack {
    /// Number of requests with this stack.
    pub requests: u64,
    /// Name of the thread that issued the requests.
    pub thread: String,
    /// Frames from the outermost to the innermost, as [`frame`](crate::folded::frame) formats them.
    pub frames: Vec<String>,
}

/// Events on the way of requests, per request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Between {
    /// Machine on which the events were counted.
    pub side: Side,
    /// Kind of the events.
    pub what: Crossing,
    /// Mean number of events per request.
    pub per_request: f64,
}

/// Kinds of events that interrupt a request's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Crossing {
    /// Exits from the guest's code to the hypervisor.
    Exits,
    /// Switches from one thread on the path to another one.
    Switches,
    /// Wake-ups of a thread on the path.
    WakeUps,
    /// System calls.
    Calls,
}

impl Crossing {
    /// All kinds.
    pub const ALL: [Crossing; 4] = [
        Crossing::Exits,
        Crossing::Switches,
        Crossing::WakeUps,
        Crossing::Calls,
    ];

    /// Returns the name of the kind.
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
    /// Writes the path into a cell's folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        replace(&folder.join(FILE), self)
    }

    /// Reads the path of a cell; `None` if the cell has no path. All values are finite and not
    /// negative, and each device has a stack.
    ///
    /// # Errors
    /// The file is damaged, or does not lie in that folder.
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
