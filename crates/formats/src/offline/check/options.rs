//! Options of a check.

/// The changes that a check may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing: the file is only read.
    #[default]
    Nothing,
    /// Leaked clusters are freed. This never changes the disk's contents.
    Leaks,
    /// Everything. Data that cannot be reached any more reads as zeroes (or as the backing file)
    /// after the repair, and its space is freed.
    All,
}

/// Options of a check.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The changes that the check may make.
    pub repair: Repair,
    /// Maximum memory in bytes for the reference counters, which take two bytes per cluster of the
    /// file.
    pub max_memory: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            repair: Repair::Nothing,
            max_memory: 2 << 30,
        }
    }
}
