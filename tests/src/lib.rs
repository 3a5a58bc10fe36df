//! End-to-end tests with real peers: see the files in `tests/`.
