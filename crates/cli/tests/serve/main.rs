//! Tests `fathom serve` and the commands that use its API, as users run them.

mod advise;
mod alarms;
mod api;
mod backup_identity;
mod backups;
mod bitmaps;
#[allow(dead_code, reason = "pages without charts need a part of it")]
#[path = "../../../report/tests/support/browser.rs"]
mod browser;
mod clients;
mod commits;
mod control_kills;
mod daemon;
mod disks;
#[path = "../support/driver.rs"]
mod driver;
mod durability;
mod elsewhere;
mod encryption;
mod errors;
#[path = "../support/exercise.rs"]
mod exercise;
mod filters;
mod foreign;
mod formats;
mod fuse;
mod groups;
mod image_problems;
mod internal;
mod jobs;
mod keep;
#[path = "../support/kinds.rs"]
mod kinds;
mod live;
#[path = "../support/made.rs"]
mod made;
mod memory;
mod messages;
mod metrics;
mod middles;
mod mirror;
mod mirror_busy;
mod mirror_ends;
mod moments;
mod nbd;
mod odd_sizes;
mod own_bitmaps;
mod owners;
mod packed;
mod page;
mod pools;
mod probes;
mod quitting;
mod replaced;
mod resize;
mod scale;
mod sharing;
mod snapshots;
mod sockets;
mod starved;
mod streams;
mod stuck_jobs;
mod superseded;
#[path = "../support/mod.rs"]
mod support;
mod surprises;
mod surroundings;
mod switch_kills;
mod targets;
mod tenants;
mod top;
mod trace;
mod unserved_bitmaps;
mod upgrade;
mod watching;
