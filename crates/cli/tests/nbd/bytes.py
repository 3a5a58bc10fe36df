# Several connections write where they like, to the byte, with many requests in
# flight. Each owns some of the bytes, next to bytes of others; a model says
# what must come of them. Behind these are blocks that somebody else writes as
# a whole (here, or with GUEST by another program), of which the connections
# write some bytes.
CONNECTIONS, DEPTH, REQUESTS = 4, 6, int(os.environ.get("REQUESTS", 900))
SHARED = int(os.environ["SHARED"])  # where these blocks begin
BLOCK = 4096
BLOCKS = 8
OURS = [(7, 100), (511, 2), (513, 1), (1500, 600), (4095, 1)]  # (offset, length)
rng = random.Random(int(os.environ.get("FATHOM_SEED", "0") or 0) + 1)
handles = [connect(strict=False) for _ in range(CONNECTIONS)]
model = bytearray(rng.randbytes(SHARED))
handles[0].pwrite(model, 0)
errors, flying, left = [], [], REQUESTS

# Who owns which range, each with one request in flight at most.
owned, at = [[] for _ in handles], 0
while at < SHARED:
    length = min(SHARED - at, rng.choice([1, 3, 100, 511, 512, 513, 4096, 5000, 20000, 300000]))
    owned[rng.randrange(CONNECTIONS)].append((at, length))
    at += length


def part_of(start, length):
    skip = rng.randrange(length)
    return (start, length) if rng.randrange(3) == 0 else (start + skip, 1 + rng.randrange(length - skip))


def ended(place, what, then=lambda: None):
    def done(error):
        if error.value:
            errors.append(f"{what} at {place}: {error.value}")
        flying.remove(place)
        then()
        return 1
    return done


def submit(n):
    h, place = handles[n], rng.choice(owned[n])
    if place in flying:
        return
    flying.append(place)
    start, length = part_of(*place)
    fua = rng.choice([0, 0, nbd.CMD_FLAG_FUA])
    kind = rng.randrange(8)
    if kind < 4:
        data = rng.randbytes(length)
        model[start:start + length] = data
        h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), start, ended(place, "write"), fua)
    elif kind < 6:
        model[start:start + length] = bytes(length)
        flags = rng.choice([0, nbd.CMD_FLAG_NO_HOLE]) | fua
        h.aio_zero(length, start, ended(place, "zero"), flags)
    elif kind == 6:
        h.aio_cache(length, start, ended(place, "cache"))
    else:
        buffer = nbd.Buffer(length)
        def check():
            if buffer.to_bytearray() != model[start:start + length]:
                errors.append(f"read at {start}, {length} bytes")
        h.aio_pread(buffer, start, ended(place, "read", check))


def ours(block):
    return [(SHARED + block * BLOCK + at, length) for at, length in OURS]


def submit_ours(n):
    place = rng.choice(ours(rng.randrange(BLOCKS)))
    if place in flying:
        return
    flying.append(place)
    data = bytes([128 + rng.randrange(128)]) * place[1]
    handles[n].aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), place[0], ended(place, "write"))


# What belongs to nobody else has the version that was written last.
versions, to_write = [0] * BLOCKS, []


def whole(n):
    block = rng.randrange(BLOCKS)
    place = (SHARED + block * BLOCK, BLOCK)
    if place in flying:
        return
    flying.append(place)
    h, before = handles[n], versions[block]
    buffer = nbd.Buffer(BLOCK)
    def check():
        got, theirs = buffer.to_bytearray(), bytearray([1]) * BLOCK
        for at, length in OURS:
            theirs[at:at + length] = bytes(length)
        stale = [at for at in range(BLOCK) if theirs[at] and got[at] != before]
        if before and stale:
            errors.append(f"block {block} has not version {before} at {stale[:10]}")
        versions[block] = before % 127 + 1
        flying.append(place)
        to_write.append((h, place, versions[block]))  # not from within a callback
    h.aio_pread(buffer, place[0], ended(place, "whole read", check))


GUEST = "GUEST" in os.environ
while left or flying:
    for n in range(CONNECTIONS):
        while left and handles[n].aio_in_flight() < DEPTH:
            left -= 1
            kind = rng.randrange(4)
            if kind < 2:
                submit(n)
            elif kind == 2 or GUEST:
                submit_ours(n)
            else:
                whole(n)
    for h in handles:
        h.poll(1 if h.aio_in_flight() else 0)
    assert not errors, errors
    while to_write:
        h, place, version = to_write.pop()
        data = nbd.Buffer.from_bytearray(bytearray([version]) * BLOCK)
        h.aio_pwrite(data, place[0], ended(place, "whole write"))

for h in handles:
    assert h.pread(SHARED, 0) == model
    h.flush()

# As long as what is done in one piece, and a little less and more.
for length in (262_143, 262_144, 262_145, 600_000):
    for offset in (1, 512, 4095, 4097):
        data = rng.randbytes(length)
        handles[1].pwrite(data, offset)
        model[offset:offset + length] = data
        assert handles[2].pread(length, offset) == data
        assert handles[2].pread(length, offset, nbd.CMD_FLAG_DF) == data
        handles[3].zero(length // 2, offset)
        model[offset:offset + length // 2] = bytes(length // 2)
assert handles[0].pread(SHARED, 0) == model

# A trim touches whole blocks only, and may do nothing.
h = handles[0]
h.trim(5000, 1)
h.trim(100, 10_100)
got = h.pread(12_000, 0)
assert got[5001:] == model[5001:12_000] and got[:1] == model[:1], "trimmed too much"
for at, byte in enumerate(got):
    assert byte in (0, model[at]), at
h.pwrite(model[:12_000], 0)

# Which parts hold data is told to the byte.
h.zero(1 << 20, SHARED + (1 << 20))
h.pwrite(b"x", SHARED + (1 << 20) + 100_001)
for offset, length in [(1, 1), (511, 2), (99_999, 3), (100_001, 1), (0, 300_001), (3, 200_000)]:
    offset += SHARED + (1 << 20)
    for flags in (0, nbd.CMD_FLAG_REQ_ONE):
        told = extents(h, length, offset, flags)
        assert sum(length for _, length, _ in told) >= length
        for start, count, state in told:
            zeroes = not any(h.pread(min(count, offset + length - start), start))
            assert zeroes or not state & nbd.STATE_ZERO, (start, count, state)
size = h.get_size()
h.pwrite(b"end", size - 3)
assert h.pread(3, size - 3) == b"end"
refused(lambda: h.pread(2, size - 1), errno.EINVAL)
refused(lambda: h.pwrite(b"12", size - 1), errno.ENOSPC, errno.EINVAL)
for h in handles:
    h.shutdown()
