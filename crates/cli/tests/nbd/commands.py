# Every command with every flag that it may have.
h = connect()
SIZE = h.get_size()
K, M = 1 << 10, 1 << 20
FUA, NO_HOLE, FAST = nbd.CMD_FLAG_FUA, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FAST_ZERO
HOLE, ZERO = nbd.STATE_HOLE, nbd.STATE_ZERO
zeroes = bytes(16 * M)

assert SIZE == int(os.environ["SIZE"]), SIZE
assert h.get_protocol() == "newstyle-fixed"
assert h.get_structured_replies_negotiated()
for can in ("flush", "fua", "trim", "zero", "cache", "df", "multi_conn"):
    assert getattr(h, "can_" + can)(), can
# Zeroes may have to be written like data, so nobody is promised that they are faster.
assert not h.can_fast_zero()
assert not h.is_read_only()
minimum, preferred, maximum = (h.get_block_size(kind) for kind in range(3))
assert minimum <= 512 <= preferred and maximum >= 32 * M, (minimum, preferred, maximum)

# New: zeroes everywhere, and who asks is told so.
assert all(state & ZERO for _, _, state in extents(h, SIZE, 0)), extents(h, SIZE, 0)
assert h.pread(16 * M, 0) == zeroes

# Reads and writes, at once durable or not.
data = random.Random(1).randbytes(M)
h.pwrite(data, M)
h.pwrite(data[::-1], 5 * M, FUA)
h.flush()
assert h.pread(M, M) == data and h.pread(M, 5 * M) == data[::-1]
assert h.pread(512, 2 * M - 512) == data[-512:]
h.cache(M, M)

# No extent that has data is called zeroes, and what is called so is zero.
for offset, length, state in extents(h, SIZE, 0) + extents(h, SIZE, 0, nbd.CMD_FLAG_REQ_ONE):
    overlaps = any(offset < start + M and start < offset + length for start in (M, 5 * M))
    assert not (overlaps and state & (ZERO | HOLE)), (offset, length, state)
assert any(state & HOLE for _, _, state in extents(h, SIZE - 8 * M, 8 * M)), "the rest is a hole"


# Chunks of a read: each byte once, holes are zeroes, and DF forbids to split.
def chunks(count, offset, flags=0):
    found = []
    def note(buffer, at, status, error):
        found.append((at, len(buffer), status))
        assert status != nbd.READ_HOLE or not any(buffer)
    got = h.pread_structured(count, offset, note, flags)
    at = offset
    for start, length, _ in sorted(found):
        assert start == at, found
        at += length
    assert at == offset + count, found
    assert bytes(got) == h.pread(count, offset)
    return found


assert len(chunks(4 * M, M // 2)) >= 1
assert len(chunks(512, M)) == 1
assert len(chunks(4 * M, M // 2, nbd.CMD_FLAG_DF)) == 1
assert all(status == nbd.READ_HOLE for _, _, status in chunks(16 * M, SIZE - 16 * M))

# Zeroes: with or without a hole, never "fast", aligned to clusters or not.
h.zero(256 * K, M)
h.zero(256 * K, M + 512 * K + 512, NO_HOLE)
h.zero(512, 5 * M + 512, FUA)
expected = bytearray(data)
expected[:256 * K] = zeroes[:256 * K]
expected[512 * K + 512:768 * K + 512] = zeroes[:256 * K]
assert h.pread(M, M) == expected
hasty = connect(strict=False)
try:
    hasty.zero(128 * K, M + 896 * K, FAST)
    raise AssertionError("zeroes were written fast")
except nbd.Error as e:
    assert e.errno == "ENOTSUP", e
hasty.shutdown()
assert h.pread(M, M) == expected

# Trim: zeroes or what was there.
h.trim(512 * K, 5 * M)
h.trim(512, 5 * M + 768 * K, FUA)
got = h.pread(M, 5 * M)
for at in range(0, M, 512):
    old = data[::-1][at:at + 512] if at != 512 else zeroes[:512]
    trimmed = at < 512 * K or at == 768 * K
    assert got[at:at + 512] in ([old, zeroes[:512]] if trimmed else [old]), at

# FUA means something for every command, and for those that only read nothing.
h.flush()
loose = connect(strict=False)
assert loose.pread(512, 0, FUA) == zeroes[:512]
loose.cache(512, 0, FUA)
loose.flush(FUA)
loose.shutdown()
h.shutdown()
