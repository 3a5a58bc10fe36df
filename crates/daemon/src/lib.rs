//! The serving process: configuration, stacks, control, statistics.
