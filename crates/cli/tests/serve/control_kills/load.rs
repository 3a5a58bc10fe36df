//! Clients of a server that is killed: NBD clients of a server without tenants, and front-ends of
//! tenants.

use super::format_of;
use crate::mirror::{disk_after_a_kill, uri_of, write_in_order, written};
use crate::support::{Kept, Served, as_arg, eventually, fathom, stdout_of};
use crate::switch_kills::Owner;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The processes that serve the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosting {
    /// The server itself, with NBD clients.
    Server,
    /// A tenant for each disk, with a front-end of each disk.
    Tenants,
}

/// Options of the load of a front-end, which notes in a file what each block must contain.
const VERIFIED: [&str; 6] = [
    "--rw",
    "randwrite",
    "--verify",
    "--iodepth",
    "4",
    "--verify-state",
];

impl Hosting {
    /// Writes the configuration with this image of the static disk.
    pub fn configure(self, dir: &Path, image: &str, more: &str) {
        let path = |name: &str| as_arg(&dir.join(name));
        let (clients, export) = match self {
            Hosting::Server => (
                format!("[nbd]\nlisten = ['unix:{}']\n", path("n")),
                "".into(),
            ),
            Hosting::Tenants => {
                let export = format!(
                    "vhost-user = '{}'\ncache = 'writethrough'\n",
                    path("static.s")
                );
                (String::new(), export)
            }
        };
        let tenants = self == Hosting::Tenants;
        let text = format!(
            "disks-dir = 'disks'\ntenants = {tenants}\napi = {{ socket = '{}' }}\n{clients}\
             [[disk]]\nname = 'static'\nimage = '{image}'\nformat = '{}'\n{export}{more}",
            path("c"),
            format_of(image),
        );
        fs::write(path("conf"), text).unwrap();
    }

    /// Returns the options of `fathom disk add` that let clients reach the disk.
    pub fn export(self, served: &Served, owner: Owner) -> Vec<String> {
        match self {
            Hosting::Server => vec!["--nbd".into()],
            Hosting::Tenants => {
                let socket = self.place(served, owner);
                ["--vhost-user", &socket, "--cache", "writethrough"]
                    .map(str::to_owned)
                    .into()
            }
        }
    }

    /// Returns the URI or the socket by which clients reach the disk.
    pub fn place(self, served: &Served, owner: Owner) -> String {
        match self {
            Hosting::Server => uri_of(served, owner.disk()),
            Hosting::Tenants => served.arg(&format!("{}.s", owner.disk())),
        }
    }

    /// Starts a client that writes, and notes in the file `log` what was acknowledged.
    pub fn start_load(self, place: &str, log: &Path) -> Kept {
        match self {
            Hosting::Server => write_in_order(place, log),
            Hosting::Tenants => {
                let mut bench = fathom();
                bench.args(["bench", "--vhost-user", place, "--runtime", "10m"]);
                Kept::spawn(bench.args(VERIFIED).arg(log))
            }
        }
    }

    /// Waits until the client has written.
    pub fn wait_for_writes(self, served: &Served, owner: Owner, log: &Path) {
        eventually("writes", || {
            let has_written = match self {
                Hosting::Server => written(log) > 5,
                Hosting::Tenants => {
                    let shown = stdout_of(&["show", &served.api(), "--json"]);
                    let shown: Value = serde_json::from_str(&shown).unwrap();
                    let requests = &shown[owner.disk()]["workers"][0]["requests"];
                    requests.as_u64() > Some(20)
                }
            };
            has_written.then_some(())
        });
    }

    /// Checks that the disk has all writes that were acknowledged.
    pub fn check(self, served: &Served, owner: Owner, log: &Path) {
        match self {
            Hosting::Server => drop(disk_after_a_kill(served, owner.disk(), log, 0)),
            Hosting::Tenants => {
                let (place, log) = (self.place(served, owner), as_arg(log));
                let bench = ["bench", "--vhost-user", &place, "--verify-only"];
                stdout_of(&[&bench[..], &VERIFIED, &[&log]].concat());
            }
        }
    }
}
