"""A client that is in the middle of everything when its server is upgraded: it says "ready", and goes
on when it gets a line."""

import socket
import struct
import sys

s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.settimeout(60)
MIB = 1 << 20
READ, WRITE, MAGIC = 0, 1, 0x25609513


def exactly(n):
    got = bytearray()
    while len(got) < n:
        part = s.recv(n - len(got))
        assert part, "the server has closed the connection"
        got += part
    return bytes(got)


def upgrade():
    print("ready", flush=True)
    assert sys.stdin.readline()


def request(command, cookie, offset, length):
    return struct.pack(">IHHQQI", MAGIC, 0, command, cookie, offset, length)


def reply():
    magic, error, cookie = struct.unpack(">IIQ", exactly(16))
    assert magic == 0x67446698, hex(magic)
    return error, cookie


def check(offset, data):
    s.sendall(request(READ, 99, offset, len(data)))
    assert reply() == (0, 99)
    assert exactly(len(data)) == data, offset


# The handshake, without any extension: NBD_OPT_EXPORT_NAME.
assert exactly(18)[:16] == b"NBDMAGICIHAVEOPT"
s.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, 0))
size = struct.unpack(">QH", exactly(10))[0]
pattern = bytes(i * 7 % 251 for i in range(3 * MIB + 1000))

# Between two requests, in the middle of a header, and of its next byte.
header = request(WRITE, 1, 4096, 512)
for cut in 0, 1, 27:
    s.sendall(header[:cut])
    upgrade()
    s.sendall(header[cut:] + pattern[:512])
    assert reply() == (0, 1)
check(4096, pattern[:512])

# In the middle of a small payload, and at several places of a large one.
s.sendall(header + pattern[1:100])
upgrade()
s.sendall(pattern[100:513])
assert reply() == (0, 1)
check(4096, pattern[1:513])
s.sendall(request(WRITE, 2, 5000, len(pattern)))
at = 0
for cut in 0, 1, 300_000, 262_144 * 4 - 904, 2_000_000, len(pattern) - 1:
    s.sendall(pattern[at:cut])
    upgrade()
    at = cut
# With what follows, which may be answered before it.
s.sendall(pattern[at:] + request(READ, 3, 4096, 512))
for _ in range(2):
    error, cookie = reply()
    assert error == 0
    if cookie == 3:
        assert exactly(512) == pattern[1:513]
check(5000, pattern)

# The payload of a refused write: the error comes after it, from whichever server has received its end.
s.sendall(request(WRITE, 4, size - 512, MIB) + pattern[: MIB // 2])
upgrade()
s.sendall(pattern[MIB // 2 : MIB])
error, cookie = reply()
assert error == 28 and cookie == 4, (error, cookie)
check(5000, pattern[:4096])

# Replies that are not read: more than the socket has room for, and more requests behind them.
for cookie in range(40):
    s.sendall(request(READ, cookie, 5000 + cookie, MIB))
for _ in range(3):
    upgrade()
seen = set()
for _ in range(40):
    error, cookie = reply()
    assert error == 0
    assert exactly(MIB) == pattern[cookie : cookie + MIB], cookie
    seen.add(cookie)
assert len(seen) == 40
upgrade()
check(5000, pattern)
print("done", flush=True)
