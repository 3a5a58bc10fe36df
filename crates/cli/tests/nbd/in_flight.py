# Many requests in flight on two connections, of all kinds, none of which
# overlap; a model says what must come of them. The disk is all zeroes before.
SIZE, REQUESTS, DEPTH = 16 << 20, int(os.environ.get("REQUESTS", 1500)), 48
rng = random.Random(int(os.environ.get("FATHOM_SEED", "0") or 0) + 1)
handles = [connect(), connect()]
model = bytearray(SIZE)
flying = {}  # number -> (start, end)
left = REQUESTS
errors = []


def free_range(longest):
    for _ in range(50):
        length = 512 * (1 + rng.randrange(1 << rng.randrange(longest.bit_length() - 9)))
        start = 512 * rng.randrange((SIZE - length) // 512 + 1)
        if all(end <= start or start + length <= begin for begin, end in flying.values()):
            return start, length
    return None


def check(number, start, buffer, learn):
    def done(error):
        got = buffer.to_bytearray()
        if error.value:
            errors.append(f"read at {start}: {error.value}")
        elif learn:
            # Trimmed: each sector has zeroes or what it had.
            for at in range(0, len(got), 512):
                sector = got[at:at + 512]
                if any(sector) and sector != model[start + at:start + at + 512]:
                    errors.append(f"trimmed sector at {start + at}")
            model[start:start + len(got)] = got
        elif got != model[start:start + len(got)]:
            errors.append(f"read at {start}, {len(got)} bytes: wrong data")
        del flying[number]
        return 1
    return done


def ended(number, what, then=None):
    def done(error):
        if error.value:
            errors.append(f"{what}: {error.value}")
        del flying[number]
        if then:
            then()
        return 1
    return done


def submit(number):
    h, kind = rng.choice(handles), rng.randrange(10)
    found = free_range(1 << 20 if kind >= 8 else 256 << 10)
    if found is None:
        return False
    start, length = found
    flying[number] = (start, start + length)
    fua = rng.choice([0, 0, 0, nbd.CMD_FLAG_FUA])
    if kind < 4:
        data = bytes([rng.randrange(1, 256)]) * length
        model[start:start + length] = data
        h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), start,
                     ended(number, "write"), fua)
    elif kind < 7:
        buffer = nbd.Buffer(length)
        h.aio_pread(buffer, start, check(number, start, buffer, False))
    elif kind == 7:
        h.aio_flush(ended(number, "flush"))
    elif kind == 8:
        model[start:start + length] = bytes(length)
        flags = rng.choice([0, nbd.CMD_FLAG_NO_HOLE]) | fua
        h.aio_zero(length, start, ended(number, "zero"), flags)
    else:
        # The range stays in flight until it is known what became of it.
        trimmed.append((number, start, length))
        h.aio_trim(length, start, lambda error: trim_ended(number, error), fua)
    return True


trimmed, to_learn = [], []


def trim_ended(number, error):
    if error.value:
        errors.append(f"trim: {error.value}")
    to_learn.append(next(t for t in trimmed if t[0] == number))
    return 1


def progress():
    for h in handles:
        h.poll(1 if h.aio_in_flight() else 0)
    while to_learn:
        number, start, length = to_learn.pop()
        buffer = nbd.Buffer(length)
        handles[0].aio_pread(buffer, start, check(number, start, buffer, True))


while left or flying:
    while left and len(flying) < DEPTH and submit(left):
        left -= 1
    progress()
    assert not errors, errors

for h in handles:
    assert h.pread(SIZE, 0) == model
    h.flush()
    h.shutdown()
with open(os.environ["MODEL"], "wb") as file:
    file.write(model)
