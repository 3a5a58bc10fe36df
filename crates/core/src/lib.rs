//! Requests, disks, channels, sources and the worker loop.
