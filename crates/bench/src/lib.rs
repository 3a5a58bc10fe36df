//! A load generator that speaks vhost-user-blk, and the same load on a file.
