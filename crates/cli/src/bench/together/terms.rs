//! The description of a load that a client sends to agents. The target is the agent's own.

use anyhow::{Context, anyhow};
use fathom_load::Load;
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    rw: String,
    rwmixread: u8,
    rwmixtrim: u8,
    rwmixzero: u8,
    bs: u32,
    iodepth: u16,
    queues: u16,
    /// Times are in milliseconds.
    runtime: Option<u64>,
    ramp: u64,
    offset: u64,
    size: Option<u64>,
    number_ios: Option<u64>,
    fsync: u32,
    verify: bool,
    seed: u64,
    continue_on_error: bool,
    readonly: bool,
    timeout: u64,
}

impl Terms {
    pub fn of(load: &Load) -> anyhow::Result<Terms> {
        if load.verify_state.is_some() || !load.cpus.is_empty() {
            return Err(anyhow!(
                "--verify-state, --cpus: not with --client; use them with --serve on the hosts"
            ));
        }
        let ms = |time: Duration| time.as_millis() as u64;
        Ok(Terms {
            rw: load.rw.name().to_owned(),
            rwmixread: load.rwmixread,
            rwmixtrim: load.rwmixtrim,
            rwmixzero: load.rwmixzero,
            bs: load.bs,
            iodepth: load.iodepth,
            queues: load.queues,
            runtime: load.runtime.map(ms),
            ramp: ms(load.ramp),
            offset: load.offset,
            size: load.size,
            number_ios: load.number_ios,
            fsync: load.fsync,
            verify: load.verify,
            seed: load.seed,
            continue_on_error: load.continue_on_error,
            readonly: load.readonly,
            timeout: ms(load.timeout),
        })
    }

    /// Returns the load. `here` is the agent's own load, whose CPUs and --readonly stay in force.
    pub fn load(self, here: Load) -> anyhow::Result<Load> {
        let rw = self
            .rw
            .parse()
            .map_err(|_| anyhow!("--rw {}: unknown to this version", self.rw));
        Ok(Load {
            rw: rw.context("the agent is of another version")?,
            rwmixread: self.rwmixread,
            rwmixtrim: self.rwmixtrim,
            rwmixzero: self.rwmixzero,
            bs: self.bs,
            iodepth: self.iodepth,
            queues: self.queues,
            runtime: self.runtime.map(Duration::from_millis),
            ramp: Duration::from_millis(self.ramp),
            offset: self.offset,
            size: self.size,
            number_ios: self.number_ios,
            fsync: self.fsync,
            verify: self.verify,
            seed: self.seed,
            continue_on_error: self.continue_on_error,
            readonly: self.readonly || here.readonly,
            timeout: Duration::from_millis(self.timeout),
            cpus: here.cpus,
            stop: here.stop,
            ..Load::default()
        })
    }
}
