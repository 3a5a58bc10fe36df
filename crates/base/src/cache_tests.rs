use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const STRIPE: u64 = 4096;
const BOOTS: [&str; 2] = [
    "11111111-1111-1111-1111-111111111111",
    "22222222-2222-2222-2222-222222222222",
];

fn open_at(dir: &Path, boot: usize) -> Cache {
    let geometry = Geometry {
        version: 1,
        size: 40 * STRIPE + 512,
        stripe: STRIPE,
    };
    Cache::open(dir, geometry, BOOTS[boot % 2]).unwrap()
}

fn there(cache: &Cache) -> Vec<u32> {
    (0..41).filter(|&stripe| cache.has(stripe)).collect()
}

fn sync_of(cache: &mut Cache) -> Sync {
    cache.sync().unwrap().unwrap()
}

/// Makes the live stripes durable.
fn sync(cache: &mut Cache) {
    let synced = sync_of(cache).run();
    cache.synced(synced).unwrap();
}

fn put(cache: &mut Cache, stripe: u32) {
    let (at, len) = cache.range(stripe);
    cache
        .data
        .write_all_at(&vec![stripe as u8 + 1; len as usize], at)
        .unwrap();
    cache.add(stripe);
}

#[test]
fn only_a_power_loss_loses_stripes_that_were_not_synced() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 3);
    put(&mut cache, 40);
    sync(&mut cache);
    put(&mut cache, 7);
    drop(cache);
    let mut cache = open_at(dir.path(), 0);
    // Kernels before 6.8 do not report whether the file system has been mounted again.
    if mount_of(&cache.live_file).unwrap().is_some() {
        assert_eq!((there(&cache), cache.present()), (vec![3, 7, 40], 3));
        // The stripe must still be made durable.
        assert_eq!(sync_of(&mut cache).stripes, [7]);
    }
    drop(cache);
    let cache = open_at(dir.path(), 1);
    assert_eq!((there(&cache), cache.present()), (vec![3, 40], 2));
    assert_eq!(cache.taken(), 2 * STRIPE);
}

/// The file system was mounted again, or the keeper was killed during a sync that may have failed.
#[test]
fn after_a_power_loss_only_synced_stripes_count() {
    for (at, byte) in [(MOUNT_AT, 0xee), (SYNCING_AT, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let mut cache = open_at(dir.path(), 0);
        put(&mut cache, 3);
        sync(&mut cache);
        put(&mut cache, 7);
        // A user that has mapped the live map observes the removal.
        let user = LiveMap::map(&cache.shown().unwrap()[1], 41, false).unwrap();
        assert!(user.look((7, 1)).is_some());
        cache.live_file.write_all_at(&[byte], at).unwrap();
        drop(cache);
        for _ in 0..2 {
            let mut cache = open_at(dir.path(), 0);
            assert_eq!((there(&cache), cache.present()), (vec![3], 1));
            assert_eq!(cache.taken(), STRIPE);
            assert!(cache.sync().unwrap().is_none());
            assert!(user.look((3, 1)).is_some() && user.look((7, 1)).is_none());
        }
    }
}

#[test]
fn sync_in_progress_is_noted_until_its_outcome_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 7);
    let begun = sync_of(&mut cache);
    // The keeper is killed before the sync.
    drop(cache);
    assert!(there(&open_at(dir.path(), 0)).is_empty());
    drop(begun);
}

#[test]
fn what_was_not_used_for_longest_goes() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    (0..10).for_each(|stripe| put(&mut cache, stripe));
    cache.is_used(0);
    cache.is_used(4_000_000);
    assert_eq!(cache.evict(3).unwrap(), 3);
    assert_eq!(there(&cache), [0, 4, 5, 6, 7, 8, 9]);
    assert_eq!(cache.taken(), 7 * STRIPE);
    assert_eq!(cache.evict(100).unwrap(), 7);
    assert_eq!((cache.evict(1).unwrap(), cache.taken()), (0, 0));
}

#[test]
fn all_that_is_not_durable_goes_when_a_sync_fails() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 4);
    sync(&mut cache);
    put(&mut cache, 5);
    let sync = sync_of(&mut cache);
    put(&mut cache, 6);
    let outcome = Err(io::Error::from_raw_os_error(5));
    let (stripes, removals) = (sync.stripes, sync.removals);
    let failed = Synced {
        stripes,
        removals,
        outcome,
    };
    assert!(cache.synced(failed).is_err());
    // The next sync succeeds even if the kernel has lost the data of stripe 6, added during this
    // sync.
    assert_eq!((there(&cache), cache.present()), (vec![4], 1));
    assert!(cache.sync().unwrap().is_none());
    assert_eq!(there(&open_at(dir.path(), 1)), [4]);
}

#[test]
fn removal_that_a_kill_interrupts_survives_a_power_loss() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 5);
    sync(&mut cache);
    // The keeper was killed after this step of the removal.
    cache.live.remove(5);
    drop(cache);
    assert!(there(&open_at(dir.path(), 0)).is_empty());
    assert!(there(&open_at(dir.path(), 1)).is_empty());
}

#[test]
fn failed_sync_makes_unsynced_stripes_invalid() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 5);
    let sync = sync_of(&mut cache);
    assert_eq!(cache.evict(1).unwrap(), 1);
    // A write of the stripe that started before the failure.
    let failures = cache.failures();
    cache.data.write_all_at(&[6; 4096], 5 * STRIPE).unwrap();
    let (stripes, removals) = (sync.stripes, sync.removals);
    let outcome = Err(io::Error::from_raw_os_error(5));
    let failed = Synced {
        stripes,
        removals,
        outcome,
    };
    assert!(cache.synced(failed).is_err());
    assert_ne!(cache.failures(), failures);
    assert!(there(&cache).is_empty());
    let mut data = [0; 4096];
    cache.data.read_exact_at(&mut data, 5 * STRIPE).unwrap();
    assert_eq!(data, [6; 4096]);
}

#[test]
fn what_has_gone_meanwhile_does_not_become_durable() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 5);
    put(&mut cache, 6);
    let sync = sync_of(&mut cache);
    assert_eq!(cache.evict(1).unwrap(), 1);
    put(&mut cache, 5);
    cache.synced(sync.run()).unwrap();
    assert!(there(&open_at(dir.path(), 1)).is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Put(u32),
    Sync,
    FailSync,
    Evict(usize),
    Kill,
    Boot,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..41u32).prop_map(Step::Put),
        2 => Just(Step::Sync),
        1 => Just(Step::FailSync),
        2 => (1..8usize).prop_map(Step::Evict),
        1 => Just(Step::Kill),
        1 => Just(Step::Boot),
    ]
}

proptest! {
    /// After any sequence of steps, the live stripes are those of the model and have their own
    /// data.
    ///
    /// The test does not simulate that the file system loses writes in a power failure.
    #[test]
    fn what_is_live_has_its_data(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let mut boot = 0;
        let mut cache = open_at(dir.path(), boot);
        // Live stripes, and whether each is durable.
        let mut model: BTreeMap<u32, bool> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Put(stripe) if !cache.has(stripe) => {
                    put(&mut cache, stripe);
                    model.insert(stripe, false);
                }
                Step::Put(stripe) => cache.is_used(stripe),
                Step::Sync => {
                    if let Some(sync) = cache.sync().unwrap() {
                        cache.synced(sync.run()).unwrap();
                    }
                    model.values_mut().for_each(|durable| *durable = true);
                }
                Step::Evict(count) => {
                    cache.evict(count).unwrap();
                    model.retain(|stripe, _| cache.has(*stripe));
                }
                Step::Kill => {
                    cache = open_at(dir.path(), boot);
                    if mount_of(&cache.live_file).unwrap().is_none() {
                        model.retain(|_, durable| *durable);
                    }
                }
                Step::Boot => {
                    boot += 1;
                    cache = open_at(dir.path(), boot);
                    model.retain(|_, durable| *durable);
                }
                Step::FailSync => {
                    if let Some(sync) = cache.sync().unwrap() {
                        let outcome = Err(io::Error::from_raw_os_error(5));
                        let Sync { stripes, removals, .. } = sync;
                        let failed = Synced { stripes, removals, outcome };
                        prop_assert!(cache.synced(failed).is_err());
                        model.retain(|_, durable| *durable);
                    }
                }
            }
            prop_assert_eq!(there(&cache), model.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(cache.present() as usize, model.len());
            for stripe in there(&cache) {
                let (at, len) = cache.range(stripe);
                let mut data = vec![0; len as usize];
                cache.data.read_exact_at(&mut data, at).unwrap();
                prop_assert!(data.iter().all(|&byte| byte == stripe as u8 + 1));
            }
        }
    }
}
