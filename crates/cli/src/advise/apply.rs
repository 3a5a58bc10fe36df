//! Changes the options of a disk as advice says.

use fathom_advise::Change;
use fathom_core::Polling;
use fathom_spec::DiskSpec;
use fathom_storage::EngineKind;
use std::collections::BTreeMap;

/// Returns the options with the change. The error is for the user.
pub fn changed(options: &DiskSpec, change: &Change) -> Result<DiskSpec, String> {
    let mut changed = options.clone();
    match change {
        Change::Throttle { index, limits, .. } => {
            let none = limits.iter().map(|limit| (limit.clone(), String::new()));
            changed.set_filter(*index, &none.collect::<BTreeMap<_, _>>());
        }
        Change::Threads(count) => changed.iothreads = Some(*count),
        Change::AnyCpu => changed.cpus = None,
        Change::OwnThreads => changed.pool = None,
        Change::Pool(pool) => changed.pool = Some(pool.clone()),
        Change::TableCache(bytes) => changed.metadata_cache = Some(*bytes),
        Change::IoUring => changed.aio = Some(EngineKind::IoUring),
        Change::PollAuto => changed.poll = Some(Polling::Auto),
        Change::Readahead { .. } => {
            let filter = change.added_filter().unwrap_or_default();
            changed.filters.push(filter.parse()?);
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_storage::Location;
    use serde_json::Value;

    fn changes() -> Vec<Change> {
        let filters = vec!["throttle:iops-total=500".into(), "log:path=/a b".into()];
        vec![
            Change::Throttle {
                index: 0,
                filter: "throttle".into(),
                limits: vec!["iops-total".into()],
            },
            Change::Threads(4),
            Change::AnyCpu,
            Change::OwnThreads,
            Change::Pool("p".into()),
            Change::TableCache(128 << 20),
            Change::IoUring,
            Change::PollAuto,
            Change::Readahead { filters },
        ]
    }

    fn spec() -> DiskSpec {
        DiskSpec {
            filters: vec!["throttle:iops-total=500,iops-size=4k".parse().unwrap()],
            cpus: Some("1".parse().unwrap()),
            pool: Some("small".into()),
            poll: Some(Polling::Off),
            ..DiskSpec::new("vm1".into(), Location::file("/a"))
        }
    }

    #[test]
    fn each_change_differs_in_its_option_only() {
        for change in changes() {
            let changed = changed(&spec(), &change).unwrap();
            assert_eq!(
                changed.differences(&spec()),
                [change.option()],
                "{change:?}"
            );
        }
        let all = changes();
        let lifted = changed(&spec(), &all[0]).unwrap();
        assert_eq!(lifted.filters[0].to_string(), "throttle:iops-size=4k");
        let ahead = changed(&spec(), all.last().unwrap()).unwrap();
        assert_eq!(ahead.filters[1].to_string(), "readahead:size=1M");
    }

    #[test]
    fn each_option_can_change_while_a_disk_is_in_use() {
        let api: Value =
            serde_json::from_str(include_str!("../../../../docs/openapi.json")).unwrap();
        for change in changes() {
            let schema = &api["components"]["schemas"]["DiskSpec"];
            let option = &schema["properties"][change.option()];
            let stated = match &option["x-change"] {
                Value::Null => &option["items"]["x-change"],
                stated => stated,
            };
            assert_eq!(stated, "live", "{change:?}");
        }
    }

    #[test]
    fn each_command_can_be_run() {
        for change in changes() {
            let command = change.command("vm1");
            let words = shlex::split(&command).unwrap();
            let parsed = crate::help::command().try_get_matches_from(words);
            assert!(parsed.is_ok(), "{command}: {parsed:?}");
        }
    }
}
