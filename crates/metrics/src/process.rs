//! The metrics of processes and pools.

use super::measured::{Measured, ProcessInfo};
use super::samples::{Samples, Style};
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::collections::BTreeMap;
use std::fmt;

/// Writes the metrics of the server's own process and those of tenants, each once.
pub fn expose(
    own: &ProcessInfo,
    disks: &[Measured],
    style: Style<'_>,
    to: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    let of_disks = disks.iter().map(|disk| &disk.process);
    let all: BTreeMap<_, _> = of_disks.chain([own]).map(|one| (one.pid, one)).collect();
    let mut tell =
        |name,
         unit,
         kind,
         help,
         each: &dyn Fn(&ProcessInfo, &mut Samples<'_, '_>) -> fmt::Result| {
            let mut to = to.encode_descriptor(name, help, Some(&unit), kind)?;
            all.values().try_for_each(|process| {
                let pid = process.pid.to_string();
                each(process, &mut Samples::new(&mut to, style, ("pid", &pid)))
            })
        };
    tell(
        "fathom_process_memory",
        Unit::Bytes,
        MetricType::Gauge,
        "Resident memory of a process of the server, including guest memory that it has touched",
        &|process, to| to.gauge(&[], process.resident),
    )?;
    tell(
        "fathom_process_cpu",
        Unit::Seconds,
        MetricType::Counter,
        "CPU time of all threads of a process",
        &|process, to| to.seconds(&[], process.cpu_ns),
    )?;
    pools(disks, style, to)
}

/// Writes the metrics of each pool's threads once: all its disks in a process report the same.
fn pools(disks: &[Measured], style: Style<'_>, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let of_pools = disks.iter().filter_map(|disk| {
        let pool = disk.info.pool.as_deref()?;
        Some(((disk.process.pid, pool), &disk.pool_threads))
    });
    let all: BTreeMap<_, _> = of_pools.collect();
    if all.is_empty() {
        return Ok(());
    }
    let mut to = to.encode_descriptor(
        "fathom_pool_cpu",
        "CPU time of a pool's thread",
        Some(&Unit::Seconds),
        MetricType::Counter,
    )?;
    for ((pid, pool), threads) in all {
        let pid = pid.to_string();
        let mut samples = Samples::new(&mut to, style, ("pid", &pid));
        for (index, ns) in threads.iter().enumerate() {
            samples.seconds(&[("pool", pool), ("thread", &index.to_string())], *ns)?;
        }
    }
    Ok(())
}
