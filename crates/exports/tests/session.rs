//! One front-end's session, against the front-end of the `vhost` crate.

mod support;

use support::guest::{DATA, negotiate_features};
use support::guest::{IN, Memory, OUT, Queue, negotiate};
use support::served::Served;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

#[test]
fn a_guest_reads_and_writes() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    assert_eq!(frontend.get_queue_num().unwrap(), 4);
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 7);
    memory.write(DATA, &[0xab; 1024]);
    queue.offer(1, OUT, 3, DATA, 1024);
    queue.offer(2, IN, 4, DATA + 4096, 512);
    queue.kick();
    queue.wait();
    assert_eq!((queue.status(1), queue.status(2)), (0, 0));
    assert_eq!(memory.read(DATA + 4096, 512), [0xab; 512]);
    assert_eq!(frontend.get_vring_base(0).unwrap(), 3);
    assert_eq!(served.disk.bytes.lock().unwrap()[1536..2560], [0xab; 1024]);
}

#[test]
fn the_configuration_is_read_in_parts() {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let sectors = support::disk::SIZE / 512;
    for (offset, len) in [(0u32, 8usize), (0, 60), (0, 256), (0x100, 60)] {
        let buf = vec![0; len];
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, config) = frontend
            .get_config(offset, len as u32, flags, &buf)
            .unwrap();
        assert_eq!(config.len(), len);
        assert_eq!(config[..8], sectors.to_le_bytes());
        assert!(config[60.min(len)..].iter().all(|b| *b == 0));
    }
}
