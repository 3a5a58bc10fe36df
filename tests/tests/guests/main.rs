//! Disks of real guests, and what users do to them. One program, so that a test which waits, and
//! most of them wait for a guest most of the time, leaves its processor to another one.

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
mod limiter;
mod limits;
mod migration;
mod moves;
mod profile;
mod switches;
mod tenants;
mod upgrades;
mod walk;
