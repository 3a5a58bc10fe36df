//! A vhost-user-blk server for tests, based on the back-end of the `vhost` crate. The server
//! handles the messages, and a [`Serve`] processes the rings.

pub mod device;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// Virtio feature bits of the devices in these tests.
pub const VERSION_1: u64 = 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const LOG_ALL: u64 = 1 << 26;
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// A started ring.
#[derive(Clone)]
pub struct Vring {
    pub index: usize,
    pub size: u16,
    /// Guest-physical addresses of the descriptor table, the avail ring and the used ring.
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    pub base: u16,
    pub features: u64,
    pub kick: Arc<File>,
    pub call: Arc<File>,
    pub memory: GuestMemoryMmap,
    pub log: Option<Arc<MmapRegion>>,
    /// The connection, which the device may close.
    pub connection: Arc<UnixStream>,
}

/// A device behind the vhost-user messages.
pub trait Serve: Send + Sync + 'static {
    /// Returns the virtio features, and the capacity in sectors.
    fn offer(&self) -> (u64, u64);

    /// Serves a ring until `stop`, and returns the next avail index.
    fn serve(&self, ring: Vring, stop: &AtomicBool) -> u16;
}

/// Counters and descriptors that tests check.
#[derive(Default)]
pub struct Seen {
    pub sessions: AtomicU32,
    /// Number of sessions that received the in-flight area of the first session.
    pub inflight: AtomicU32,
    /// All call eventfds.
    pub calls: Mutex<Vec<Arc<File>>>,
}

/// A listening server, which serves one connection at a time until it is dropped.
pub struct Server {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    pub seen: Arc<Seen>,
}

impl Server {
    pub fn start(path: &Path, device: Arc<dyn Serve>) -> Server {
        let listener = UnixListener::bind(path).unwrap();
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Seen::default()));
        let (stopped, counts) = (stop.clone(), seen.clone());
        let thread = std::thread::spawn(move || {
            let area = Arc::new(Mutex::new(None));
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let session = Session::new(&device, stream.unwrap(), &area, &counts);
                session.run();
            }
        });
        Server {
            path: path.to_owned(),
            stop,
            thread: Some(thread),
            seen,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = UnixStream::connect(&self.path);
        let result = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            result.expect("the server's thread");
        }
    }
}

#[derive(Default)]
struct Ring {
    size: u16,
    addresses: [u64; 3],
    base: u16,
    kick: Option<Arc<File>>,
    call: Option<Arc<File>>,
    running: Option<(Arc<AtomicBool>, JoinHandle<u16>)>,
}

impl Ring {
    fn stop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            stop.store(true, Ordering::Relaxed);
            self.base = thread.join().unwrap();
        }
    }
}

/// The in-flight area that was last handed out.
type Area = Arc<Mutex<Option<File>>>;

struct Session {
    device: Arc<dyn Serve>,
    connection: Arc<UnixStream>,
    features: u64,
    regions: Vec<(u64, u64, u64)>,
    memory: Option<GuestMemoryMmap>,
    log: Option<Arc<MmapRegion>>,
    rings: [Ring; 4],
    area: Area,
    seen: Arc<Seen>,
}

impl Session {
    fn new(device: &Arc<dyn Serve>, stream: UnixStream, area: &Area, seen: &Arc<Seen>) -> Session {
        Session {
            device: device.clone(),
            connection: Arc::new(stream),
            features: 0,
            regions: Vec::new(),
            memory: None,
            log: None,
            rings: Default::default(),
            area: area.clone(),
            seen: seen.clone(),
        }
    }

    fn run(self) {
        let stream = self.connection.try_clone().unwrap();
        let session = Arc::new(Mutex::new(self));
        let mut handler = BackendReqHandler::from_stream(stream, session.clone());
        while handler.handle_request().is_ok() {}
        session
            .lock()
            .unwrap()
            .rings
            .iter_mut()
            .for_each(Ring::stop);
    }

    fn guest_address(&self, user: u64) -> Result<u64> {
        self.regions
            .iter()
            .find(|(_, user_base, len)| (*user_base..user_base + len).contains(&user))
            .map(|(guest, user_base, _)| guest + (user - user_base))
            .ok_or(Error::InvalidParam)
    }

    fn start(&mut self, index: usize) {
        let ring = &self.rings[index];
        let vring = Vring {
            index,
            size: ring.size,
            desc: ring.addresses[0],
            used: ring.addresses[1],
            avail: ring.addresses[2],
            base: ring.base,
            features: self.features,
            kick: ring.kick.clone().expect("a kick eventfd"),
            call: ring.call.clone().expect("a call eventfd"),
            memory: self.memory.clone().expect("a memory table"),
            log: self.log.clone(),
            connection: self.connection.clone(),
        };
        let (device, stop) = (self.device.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || device.serve(vring, &stopped));
        self.rings[index].running = Some((stop, thread));
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        self.seen.sessions.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn reset_owner(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("reset_owner"))
    }
    fn reset_device(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("reset_device"))
    }
    fn get_features(&mut self) -> Result<u64> {
        Ok(self.device.offer().0 | PROTOCOL_FEATURES)
    }
    fn set_features(&mut self, features: u64) -> Result<()> {
        self.features = features;
        Ok(())
    }
    fn set_mem_table(
        &mut self,
        ctx: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.regions = ctx
            .iter()
            .map(|r| (r.guest_phys_addr, r.user_addr, r.memory_size))
            .collect();
        let map = |(r, file): (&VhostUserMemoryRegion, File)| {
            let offset = FileOffset::new(file, r.mmap_offset);
            let region = MmapRegion::from_file(offset, r.memory_size as usize).unwrap();
            GuestRegionMmap::new(region, GuestAddress(r.guest_phys_addr)).unwrap()
        };
        let regions = ctx.iter().zip(files).map(map).collect();
        self.memory = Some(GuestMemoryMmap::from_regions(regions).unwrap());
        Ok(None)
    }
    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.rings[index as usize].size = num as u16;
        Ok(())
    }
    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let [d, u, a] = [descriptor, used, available].map(|a| self.guest_address(a));
        self.rings[index as usize].addresses = [d?, u?, a?];
        Ok(())
    }
    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.rings[index as usize].base = base as u16;
        Ok(())
    }
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let ring = &mut self.rings[index as usize];
        ring.stop();
        Ok(VhostUserVringState::new(index, ring.base.into()))
    }
    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.rings[index as usize].kick = fd.map(Arc::new);
        Ok(())
    }
    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(Arc::new);
        if let Some(fd) = &fd {
            // Make the eventfd non-blocking, as QEMU does with every received descriptor.
            rustix::io::ioctl_fionbio(&**fd, true).unwrap();
            self.seen.calls.lock().unwrap().push(fd.clone());
        }
        self.rings[index as usize].call = fd;
        Ok(())
    }
    fn set_vring_err(&mut self, _index: u8, _fd: Option<File>) -> Result<()> {
        Ok(())
    }
    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        use VhostUserProtocolFeatures as P;
        Ok(P::MQ | P::CONFIG | P::REPLY_ACK | P::INFLIGHT_SHMFD | P::LOG_SHMFD)
    }
    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }
    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }
    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        match enable {
            true => self.start(index as usize),
            false => self.rings[index as usize].stop(),
        }
        Ok(())
    }
    fn get_config(&mut self, _: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let mut config = vec![0; size as usize];
        config[..8].copy_from_slice(&self.device.offer().1.to_le_bytes());
        Ok(config)
    }
    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("set_config"))
    }
    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("set_gpu_socket"))
    }
    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("get_shared_object"))
    }
    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        *self.area.lock().unwrap() = Some(file.try_clone().unwrap());
        let area = VhostUserInflight {
            mmap_size: 4096,
            mmap_offset: 0,
            ..*wanted
        };
        Ok((area, file))
    }
    fn set_inflight_fd(&mut self, _: &VhostUserInflight, file: File) -> Result<()> {
        let inode = |f: &File| f.metadata().unwrap().ino();
        let area = self.area.lock().unwrap();
        if area.as_ref().is_some_and(|a| inode(a) == inode(&file)) {
            self.seen.inflight.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(Error::InvalidOperation("get_max_mem_slots"))
    }
    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        Err(Error::InvalidOperation("add_mem_region"))
    }
    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(Error::InvalidOperation("remove_mem_region"))
    }
    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("set_device_state_fd"))
    }
    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("check_device_state"))
    }
    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("get_shmem_config"))
    }
    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let offset = FileOffset::new(file, log.mmap_offset);
        let region = MmapRegion::from_file(offset, log.mmap_size as usize).unwrap();
        self.log = Some(Arc::new(region));
        Ok(())
    }
}

/// Sleeps until the ring is kicked, for at most 2 ms.
pub fn wait_kick(ring: &Vring) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(&*ring.kick, PollFlags::IN)];
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: 2_000_000,
    };
    let _ = poll(&mut fds, Some(&time));
    let _ = rustix::io::read(&*ring.kick, &mut [0u8; 8]);
}

/// Interrupts the driver.
pub fn call(ring: &Vring) {
    rustix::io::write(&*ring.call, &1u64.to_ne_bytes()).unwrap();
}
