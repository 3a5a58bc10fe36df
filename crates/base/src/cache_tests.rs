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

fn put(cache: &mut Cache, stripe: u32) {
    let (at, len) = cache.range(stripe);
    cache
        .data
        .write_all_at(&vec![stripe as u8 + 1; len as usize], at)
        .unwrap();
    cache.add(stripe);
}

#[test]
fn a_killed_keeper_loses_nothing_and_a_machine_what_was_not_durable() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 3);
    put(&mut cache, 40);
    let synced = cache.sync().unwrap().run();
    cache.synced(synced).unwrap();
    put(&mut cache, 7);
    drop(cache);
    let mut cache = open_at(dir.path(), 0);
    assert_eq!((there(&cache), cache.present()), (vec![3, 7, 40], 3));
    // It is not forgotten that this one is to be made durable.
    assert_eq!(cache.sync().unwrap().stripes, [7]);
    drop(cache);
    let cache = open_at(dir.path(), 1);
    assert_eq!((there(&cache), cache.present()), (vec![3, 40], 2));
    assert_eq!(cache.taken(), 2 * STRIPE);
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
fn data_that_could_not_be_made_durable_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 5);
    let sync = cache.sync().unwrap();
    put(&mut cache, 6);
    let outcome = Err(io::Error::from_raw_os_error(5));
    let (stripes, removals) = (sync.stripes, sync.removals);
    let failed = Synced {
        stripes,
        removals,
        outcome,
    };
    assert!(cache.synced(failed).is_err());
    assert_eq!(there(&cache), [6]);
}

#[test]
fn what_a_killed_keeper_was_taking_away_is_gone_after_a_loss_of_power_too() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 5);
    let synced = cache.sync().unwrap().run();
    cache.synced(synced).unwrap();
    // It had got no further.
    cache.live.remove(5);
    drop(cache);
    assert!(there(&open_at(dir.path(), 0)).is_empty());
    assert!(there(&open_at(dir.path(), 1)).is_empty());
}

#[test]
fn what_comes_again_while_a_sync_fails_is_not_taken_away() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = open_at(dir.path(), 0);
    put(&mut cache, 5);
    let sync = cache.sync().unwrap();
    assert_eq!(cache.evict(1).unwrap(), 1);
    // On its way.
    cache.data.write_all_at(&[6; 4096], 5 * STRIPE).unwrap();
    let (stripes, removals) = (sync.stripes, sync.removals);
    let outcome = Err(io::Error::from_raw_os_error(5));
    let failed = Synced {
        stripes,
        removals,
        outcome,
    };
    assert!(cache.synced(failed).is_err());
    cache.add(5);
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
    let sync = cache.sync().unwrap();
    assert_eq!(cache.evict(1).unwrap(), 1);
    put(&mut cache, 5);
    cache.synced(sync.run()).unwrap();
    assert!(there(&open_at(dir.path(), 1)).is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Put(u32),
    Sync,
    Evict(usize),
    Kill,
    Boot,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..41u32).prop_map(Step::Put),
        2 => Just(Step::Sync),
        2 => (1..8usize).prop_map(Step::Evict),
        1 => Just(Step::Kill),
        1 => Just(Step::Boot),
    ]
}

proptest! {
    /// What is live is what the model has, with the data that belongs there, whatever happens. (The file system's
    /// part of a loss of power is not played here: what the order of writes is worth is in the order itself.)
    #[test]
    fn what_is_live_has_its_data(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let mut boot = 0;
        let mut cache = open_at(dir.path(), boot);
        // Durable or not.
        let mut model: BTreeMap<u32, bool> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Put(stripe) if !cache.has(stripe) => {
                    put(&mut cache, stripe);
                    model.insert(stripe, false);
                }
                Step::Put(stripe) => cache.is_used(stripe),
                Step::Sync => {
                    if let Some(sync) = cache.sync() {
                        cache.synced(sync.run()).unwrap();
                    }
                    model.values_mut().for_each(|durable| *durable = true);
                }
                Step::Evict(count) => {
                    cache.evict(count).unwrap();
                    model.retain(|stripe, _| cache.has(*stripe));
                }
                Step::Kill => cache = open_at(dir.path(), boot),
                Step::Boot => {
                    boot += 1;
                    cache = open_at(dir.path(), boot);
                    model.retain(|_, durable| *durable);
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
