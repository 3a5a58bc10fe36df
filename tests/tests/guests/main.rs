//! Tests disks of real guests, and what users do to them.
//!
//! The tests are a single program, because most tests wait for a guest most of the time and leave
//! their CPU to other tests.

mod bases;
mod changes;
mod configured;
mod crash;
mod disks;
mod filters;
mod frozen;
mod groups;
mod hotplug;
mod jobs;
mod limits;
mod migration;
mod moves;
mod packed;
mod profile;
mod switches;
mod tenants;
mod upgrades;
mod walk;
