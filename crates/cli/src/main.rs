//! The `fathom` command: argument parsing and nothing else.

fn main() {}
