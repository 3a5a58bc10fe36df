//! Typed requests of a front-end.

use super::Frame;
use std::os::fd::OwnedFd;

/// Description of a memory region; addresses, sizes and offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub guest_addr: u64,
    pub size: u64,
    pub user_addr: u64,
    pub mmap_offset: u64,
}

/// Addresses of a vring's parts, as user addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddr {
    pub flags: u32,
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    /// The guest address at which writes to the used ring are logged.
    pub log: u64,
}

impl VringAddr {
    /// VHOST_VRING_F_LOG: writes to the used ring are logged.
    pub const F_LOG: u32 = 1;
}

/// A range of the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigRange {
    pub offset: u32,
    pub size: u32,
    pub flags: u32,
}

/// Description of the in-flight area. Front-ends pad this structure differently; `wire_len` is the
/// length in bytes that this front-end sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflight {
    pub mmap_size: u64,
    pub mmap_offset: u64,
    pub num_queues: u16,
    pub queue_size: u16,
    pub wire_len: usize,
}

impl Inflight {
    const LEN: usize = 20;

    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.wire_len);
        bytes.extend_from_slice(&self.mmap_size.to_ne_bytes());
        bytes.extend_from_slice(&self.mmap_offset.to_ne_bytes());
        bytes.extend_from_slice(&self.num_queues.to_ne_bytes());
        bytes.extend_from_slice(&self.queue_size.to_ne_bytes());
        bytes.resize(self.wire_len, 0);
        bytes
    }
}

/// A request with its payload and file descriptors. `index` is the vring's number as sent; the
/// session checks it.
#[derive(Debug)]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(Region, OwnedFd)>),
    SetLogBase {
        size: u64,
        offset: u64,
        fd: OwnedFd,
    },
    /// The eventfd is closed.
    SetLogFd,
    SetVringNum {
        index: u32,
        num: u32,
    },
    SetVringAddr {
        index: u32,
        addr: VringAddr,
    },
    SetVringBase {
        index: u32,
        base: u32,
    },
    GetVringBase {
        index: u32,
    },
    SetVringKick {
        index: u32,
        fd: Option<OwnedFd>,
    },
    SetVringCall {
        index: u32,
        fd: Option<OwnedFd>,
    },
    SetVringErr {
        index: u32,
        fd: Option<OwnedFd>,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        index: u32,
        enable: bool,
    },
    SetBackendReqFd(OwnedFd),
    GetConfig(ConfigRange),
    SetConfig {
        range: ConfigRange,
        data: Vec<u8>,
    },
    GetInflightFd(Inflight),
    SetInflightFd(Inflight, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region, OwnedFd),
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
    /// A request that this back-end does not know or has not offered.
    Unknown(u32),
}

/// Error for a message whose payload or file descriptors do not match its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {}: {problem}", name(*request))]
pub struct Malformed {
    pub request: u32,
    pub problem: &'static str,
}

/// Numbers of requests and their names in the specification.
const NAMES: [(u32, &str); 29] = [
    (1, "GET_FEATURES"),
    (2, "SET_FEATURES"),
    (3, "SET_OWNER"),
    (4, "RESET_OWNER"),
    (5, "SET_MEM_TABLE"),
    (6, "SET_LOG_BASE"),
    (7, "SET_LOG_FD"),
    (8, "SET_VRING_NUM"),
    (9, "SET_VRING_ADDR"),
    (10, "SET_VRING_BASE"),
    (11, "GET_VRING_BASE"),
    (12, "SET_VRING_KICK"),
    (13, "SET_VRING_CALL"),
    (14, "SET_VRING_ERR"),
    (15, "GET_PROTOCOL_FEATURES"),
    (16, "SET_PROTOCOL_FEATURES"),
    (17, "GET_QUEUE_NUM"),
    (18, "SET_VRING_ENABLE"),
    (21, "SET_BACKEND_REQ_FD"),
    (24, "GET_CONFIG"),
    (25, "SET_CONFIG"),
    (31, "GET_INFLIGHT_FD"),
    (32, "SET_INFLIGHT_FD"),
    (34, "RESET_DEVICE"),
    (36, "GET_MAX_MEM_SLOTS"),
    (37, "ADD_MEM_REG"),
    (38, "REM_MEM_REG"),
    (39, "SET_STATUS"),
    (40, "GET_STATUS"),
];

/// Returns the request's name in the specification.
pub fn name(request: u32) -> &'static str {
    NAMES
        .iter()
        .find(|(number, _)| *number == request)
        .map_or("unknown request", |(_, name)| name)
}

/// Returns true if the request has a reply of its own, and therefore no acknowledgement.
/// SET_LOG_BASE has one if LOG_SHMFD is negotiated.
pub fn has_reply(request: u32, log_shmfd: bool) -> bool {
    match request {
        1 | 11 | 15 | 17 | 24 | 31 | 36 | 40 => true,
        6 => log_shmfd,
        _ => false,
    }
}

const WRONG_SIZE: &str = "wrong payload size";
const WRONG_FDS: &str = "wrong number of file descriptors";

/// Reader of a payload's fields.
struct Payload<'a>(&'a [u8]);

impl Payload<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(WRONG_SIZE)?;
        self.0 = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, &'static str> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        self.take().map(u64::from_ne_bytes)
    }

    fn region(&mut self) -> Result<Region, &'static str> {
        Ok(Region {
            guest_addr: self.u64()?,
            size: self.u64()?,
            user_addr: self.u64()?,
            mmap_offset: self.u64()?,
        })
    }

    fn single_region(&mut self) -> Result<Region, &'static str> {
        self.u64()?;
        self.region()
    }

    fn vring_addr(&mut self) -> Result<VringAddr, &'static str> {
        Ok(VringAddr {
            flags: self.u32()?,
            desc: self.u64()?,
            used: self.u64()?,
            avail: self.u64()?,
            log: self.u64()?,
        })
    }

    fn config(&mut self) -> Result<ConfigRange, &'static str> {
        Ok(ConfigRange {
            offset: self.u32()?,
            size: self.u32()?,
            flags: self.u32()?,
        })
    }

    fn inflight(&mut self) -> Result<Inflight, &'static str> {
        let wire_len = self.0.len();
        let inflight = Inflight {
            mmap_size: self.u64()?,
            mmap_offset: self.u64()?,
            num_queues: self.u16()?,
            queue_size: self.u16()?,
            wire_len,
        };
        // Compilers pad the structure to a multiple of 8.
        if wire_len > Inflight::LEN.next_multiple_of(8) {
            return Err(WRONG_SIZE);
        }
        self.0 = &[];
        Ok(inflight)
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }

    /// Reads a vring's index (bits 0-7) and takes its file descriptor, unless bit 8 is set.
    fn vring_fd(&mut self, fds: &mut Vec<OwnedFd>) -> Result<(u32, Option<OwnedFd>), &'static str> {
        let word = self.u64()?;
        let fd = if word & 0x100 == 0 {
            Some(one(fds)?)
        } else {
            None
        };
        Ok((word as u32 & 0xff, fd))
    }

    fn mem_table(
        &mut self,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Vec<(Region, OwnedFd)>, &'static str> {
        let count = self.u32()?;
        self.u32()?;
        if count as usize != fds.len() {
            return Err(WRONG_FDS);
        }
        fds.drain(..).map(|fd| Ok((self.region()?, fd))).collect()
    }
}

/// Takes the only file descriptor of a message.
fn one(fds: &mut Vec<OwnedFd>) -> Result<OwnedFd, &'static str> {
    if fds.len() > 1 {
        return Err(WRONG_FDS);
    }
    fds.pop().ok_or(WRONG_FDS)
}

impl Request {
    /// Parses the request of a frame. File descriptors that the request does not own are closed.
    pub fn parse(frame: Frame) -> Result<Request, Malformed> {
        let Frame {
            header,
            payload,
            mut fds,
        } = frame;
        let malformed = |problem| Malformed {
            request: header.request,
            problem,
        };
        if header.is_reply() {
            return Err(malformed("a reply without a request"));
        }
        let mut payload = Payload(&payload);
        let request = decode(header.request, &mut payload, &mut fds).map_err(malformed)?;
        if matches!(request, Request::Unknown(_)) {
            return Ok(request);
        }
        if !payload.0.is_empty() {
            return Err(malformed(WRONG_SIZE));
        }
        // Some front-ends send the region's file descriptor with its removal.
        if !fds.is_empty() && !matches!(request, Request::RemMemReg(_)) {
            return Err(malformed(WRONG_FDS));
        }
        Ok(request)
    }
}

fn decode(
    number: u32,
    p: &mut Payload<'_>,
    fds: &mut Vec<OwnedFd>,
) -> Result<Request, &'static str> {
    Ok(match number {
        1 => Request::GetFeatures,
        2 => Request::SetFeatures(p.u64()?),
        3 => Request::SetOwner,
        4 => Request::ResetOwner,
        5 => Request::SetMemTable(p.mem_table(fds)?),
        6 => Request::SetLogBase {
            size: p.u64()?,
            offset: p.u64()?,
            fd: one(fds)?,
        },
        7 => one(fds).map(|_| Request::SetLogFd)?,
        8..=18 => decode_vring(number, p, fds)?,
        21 => Request::SetBackendReqFd(one(fds)?),
        24 => {
            let range = p.config()?;
            // The contents that the front-end sends have no meaning.
            p.rest();
            Request::GetConfig(range)
        }
        25 => {
            let (range, data) = (p.config()?, p.rest());
            if data.len() != range.size as usize {
                return Err(WRONG_SIZE);
            }
            Request::SetConfig { range, data }
        }
        31 => Request::GetInflightFd(p.inflight()?),
        32 => Request::SetInflightFd(p.inflight()?, one(fds)?),
        34 => Request::ResetDevice,
        36 => Request::GetMaxMemSlots,
        37 => Request::AddMemReg(p.single_region()?, one(fds)?),
        38 => Request::RemMemReg(p.single_region()?),
        39 => Request::SetStatus(p.u64()?),
        40 => Request::GetStatus,
        _ => Request::Unknown(number),
    })
}

/// Decodes requests 8 to 18: the vring requests and the protocol features between them.
fn decode_vring(
    number: u32,
    p: &mut Payload<'_>,
    fds: &mut Vec<OwnedFd>,
) -> Result<Request, &'static str> {
    Ok(match number {
        8 => Request::SetVringNum {
            index: p.u32()?,
            num: p.u32()?,
        },
        9 => Request::SetVringAddr {
            index: p.u32()?,
            addr: p.vring_addr()?,
        },
        10 => Request::SetVringBase {
            index: p.u32()?,
            base: p.u32()?,
        },
        11 => {
            let index = p.u32()?;
            p.u32()?;
            Request::GetVringBase { index }
        }
        12 => {
            let (index, fd) = p.vring_fd(fds)?;
            Request::SetVringKick { index, fd }
        }
        13 => {
            let (index, fd) = p.vring_fd(fds)?;
            Request::SetVringCall { index, fd }
        }
        14 => {
            let (index, fd) = p.vring_fd(fds)?;
            Request::SetVringErr { index, fd }
        }
        15 => Request::GetProtocolFeatures,
        16 => Request::SetProtocolFeatures(p.u64()?),
        17 => Request::GetQueueNum,
        18 => {
            let index = p.u32()?;
            let enable = match p.u32()? {
                0 => false,
                1 => true,
                _ => return Err("neither 0 nor 1"),
            };
            Request::SetVringEnable { index, enable }
        }
        _ => Request::Unknown(number),
    })
}
