//! Tests that refcounts of a written image grow as [`Extent::grown`] computes it.

use super::*;
use crate::qcow2::refcount::Extent;
use proptest::prelude::*;

/// Allocates clusters one by one, with new blocks and tables as they are needed.
fn allocate(g: Geometry, start: Extent, clusters: u64) -> Result<Extent, Errno> {
    let per_cluster = g.cluster_size() / TableEntry::SIZE;
    let table = vec![0; (start.table_clusters * per_cluster) as usize];
    let table_offset = HostOffset(g.cluster_size());
    let epochs = Arc::new(Epochs::default());
    let mut space = Refcounts::new(g, table, table_offset, 0, epochs).expect("an empty table");
    for number in 0..start.blocks {
        let at = 1 + start.table_clusters + number;
        space.table[number as usize] = at << g.cluster_bits;
        space.insert(number, vec![0; g.cluster_size() as usize]);
    }
    (0..start.clusters).for_each(|cluster| space.set(cluster, 1));
    let mut extent = start;
    let (mut number, mut left) = (0, clusters);
    while left > 0 {
        if let Some(run) = space.take(left, false) {
            left -= run.len();
            extent.clusters = extent.clusters.max(run.clusters.end);
            continue;
        }
        if !space.blocks.contains_key(&number) {
            let made = space.make_block(number)?;
            extent.clusters = extent.clusters.max(made.table.end);
            extent.blocks += made.blocks.end - made.blocks.start;
            if !made.table.is_empty() {
                extent.table_clusters = made.table.end - made.table.start;
            }
        }
        space.scan(number);
        number += 1;
    }
    Ok(extent)
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (9u32..=16, 0u32..=6).prop_map(|(cluster_bits, refcount_order)| Geometry {
        cluster_bits,
        refcount_order,
        extended_l2: false,
        data_file: false,
        version: 3,
    })
}

/// Returns a new image, with an L1 table of this length.
fn start(g: &Geometry, table_clusters: u64, l1_clusters: u64) -> Extent {
    let mut blocks = 1;
    loop {
        let clusters = 1 + table_clusters + blocks + l1_clusters;
        let needed = clusters.div_ceil(g.refcount_block_entries());
        if needed <= blocks {
            return Extent {
                clusters,
                blocks,
                table_clusters,
            };
        }
        blocks = needed;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn growth_is_as_computed(
        g in geometry(),
        table_clusters in 1u64..4,
        l1_clusters in 1u64..100,
        clusters in 0u64..300_000,
    ) {
        let start = start(&g, table_clusters, l1_clusters);
        prop_assume!(start.blocks <= table_clusters * g.cluster_size() / TableEntry::SIZE);
        let computed = start.grown(&g, clusters);
        prop_assert_eq!(allocate(g, start, clusters), Ok(computed), "{:?}", start);
    }
}

/// The second table of 4k clusters counts from 4 GiB on.
#[test]
fn growth_beyond_one_table_is_as_computed() {
    for (cluster_bits, refcount_order, bytes) in
        [(12, 4, 9 << 30), (9, 4, 1 << 30), (13, 6, 9 << 30)]
    {
        let g = Geometry {
            cluster_bits,
            refcount_order,
            extended_l2: false,
            data_file: false,
            version: 3,
        };
        let start = start(&g, 1, 10);
        let computed = start.grown(&g, g.clusters_of(bytes));
        assert_eq!(allocate(g, start, g.clusters_of(bytes)), Ok(computed));
        assert!(computed.table_clusters > 1, "the table has moved");
    }
}
