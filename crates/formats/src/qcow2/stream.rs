//! Creates a qcow2 image as a stream of bytes, for outputs that cannot seek: first the metadata,
//! then the data in the guest's order.

use super::create::Plan;
use super::{Geometry, L2Entry};
use crate::offline::create::{Options, Preallocation};
use crate::{Error, Format, Result};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// Maximum memory in bytes for the contents of clusters.
const MOST_MEMORY: u64 = 1 << 30;

/// The contents of an image that will be written as a stream.
pub struct Contents {
    geometry: Geometry,
    has_backing: bool,
    size: u64,
    /// The required L2 tables by their indexes in the L1 table.
    tables: BTreeMap<u64, Table>,
}

/// The contents of an L2 table: one bit per cluster for data, and one for zeroes.
struct Table {
    data: Box<[u64]>,
    zero: Box<[u64]>,
}

const BITS: u64 = u64::BITS as u64;

fn set(words: &mut [u64], bit: u64) {
    words[(bit / BITS) as usize] |= 1 << (bit % BITS);
}

fn is_set(words: &[u64], bit: u64) -> bool {
    words[(bit / BITS) as usize] & 1 << (bit % BITS) != 0
}

impl Contents {
    /// Creates the contents of an image with an empty disk of `size` bytes.
    pub fn new(options: &Options, size: u64) -> Result<Contents> {
        options.validate()?;
        let size = size.next_multiple_of(512);
        let problem = match options.format {
            Format::Raw | Format::Qed | Format::Luks | Format::Foreign(_) => {
                "only qcow2 images can be written as a stream"
            }
            _ if options.encryption.is_wanted => "cannot be encrypted",
            _ if options.qcow2.data_file.is_some() => "has no data file; omit data_file",
            _ if options.preallocation != Preallocation::Off => {
                "has no preallocation; omit preallocation"
            }
            Format::Qcow2 => {
                return Ok(Contents {
                    geometry: Plan::new(options, size, 0, 0)?.geometry(),
                    has_backing: options.backing.is_some(),
                    size,
                    tables: BTreeMap::new(),
                });
            }
        };
        Err(Error::usage(problem))
    }

    /// Adds data in a byte range of the disk. All clusters that the range touches become data.
    pub fn add_data(&mut self, range: Range<u64>) -> Result<()> {
        let clusters = self.touched(&range);
        self.mark(clusters, |table, bit| set(&mut table.data, bit))
    }

    /// Adds zeroes in a byte range of the disk, which hide the backing file's data.
    pub fn add_zeroes(&mut self, range: Range<u64>) -> Result<()> {
        if !self.has_backing {
            return Ok(());
        }
        let touched = self.touched(&range);
        if self.geometry.version < 3 {
            return self.mark(touched, |table, bit| set(&mut table.data, bit));
        }
        let size = self.geometry.cluster_size();
        let end = match range.end >= self.size {
            true => touched.end,
            false => range.end / size,
        };
        // Clusters that are zeroes only in part are written as data.
        let whole = range.start.div_ceil(size)..end;
        let (before, behind) = match whole.is_empty() {
            true => (touched, 0..0),
            false => (touched.start..whole.start, whole.end..touched.end),
        };
        self.mark(whole, |table, bit| set(&mut table.zero, bit))?;
        for part in [before, behind] {
            self.mark(part, |table, bit| set(&mut table.data, bit))?;
        }
        Ok(())
    }

    fn touched(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.size);
        range.start / self.geometry.cluster_size()..self.geometry.clusters_of(end)
    }

    fn mark(&mut self, clusters: Range<u64>, with: impl Fn(&mut Table, u64)) -> Result<()> {
        let entries = self.geometry.l2_entries();
        let words = entries.div_ceil(BITS) as usize;
        let most = MOST_MEMORY / (2 * 8 * words as u64);
        for cluster in clusters {
            let index = cluster / entries;
            if self.tables.len() as u64 >= most && !self.tables.contains_key(&index) {
                return Err(Error::usage(
                    "needs too much memory for a disk of this size; use a larger cluster_size",
                ));
            }
            let table = self.tables.entry(index).or_insert_with(|| Table {
                data: vec![0; words].into(),
                zero: vec![0; words].into(),
            });
            with(table, cluster % entries);
        }
        Ok(())
    }

    /// Returns the byte ranges of the disk that have data, in order. The ranges consist of whole
    /// clusters, except at the end of the disk.
    pub fn data(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let entries = self.geometry.l2_entries();
        let clusters = self.tables.iter().flat_map(move |(index, table)| {
            let of_table = (0..entries).filter(|bit| is_set(&table.data, *bit));
            of_table.map(move |bit| index * entries + bit)
        });
        let mut clusters = clusters.peekable();
        std::iter::from_fn(move || {
            let first = clusters.next()?;
            let mut end = first + 1;
            while clusters.next_if_eq(&end).is_some() {
                end += 1;
            }
            let size = self.geometry.cluster_size();
            Some(first * size..(end * size).min(self.size))
        })
    }

    /// Cluster size in bytes. The stream's last cluster must be padded to this size.
    pub fn cluster_size(&self) -> u64 {
        self.geometry.cluster_size()
    }

    /// Passes everything before the data to `out`, in order.
    pub fn put_metadata(
        &self,
        options: &Options,
        out: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<()> {
        let ones = |words: &[u64]| words.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
        let data = self.tables.values().map(|table| ones(&table.data)).sum();
        let plan = Plan::new(options, self.size, self.tables.len() as u64, data)?;
        let mut put = |bytes: &[u8]| out(bytes).map_err(Error::io("cannot write"));
        put(&plan.first)?;
        let mut before = 0;
        let tables = self.tables.values().map(|table| {
            let bytes = self.encode(table, &plan, before);
            before += ones(&table.data);
            bytes
        });
        let indexes = self.tables.keys().copied();
        plan.put_tables(indexes, tables, &mut |_, cluster, _| put(cluster))
    }

    /// Encodes an L2 table. `before` is the number of data clusters before those of this table.
    fn encode(&self, table: &Table, plan: &Plan, before: u64) -> Vec<u8> {
        let g = &self.geometry;
        let mut bytes = vec![0; g.cluster_size() as usize];
        let mut number = before;
        for index in 0..g.l2_entries() {
            let entry = if is_set(&table.data, index) {
                number += 1;
                L2Entry::data(g, plan.data(number - 1), true)
            } else if is_set(&table.zero, index) {
                L2Entry::zero(g, None)
            } else {
                continue;
            };
            entry.encode(&mut bytes, (index * g.l2_entry_size()) as usize, g);
        }
        bytes
    }
}
