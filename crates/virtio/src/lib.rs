//! Split virtqueues and virtio-blk requests.
