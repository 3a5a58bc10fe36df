//! Who may ask: vhost-user-blk.
