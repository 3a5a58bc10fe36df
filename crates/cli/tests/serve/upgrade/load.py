"""A client that writes and reads a disk by libnbd, with many requests in flight, until its standard
input ends. What it reads must be what it wrote. It prints a line for each round."""

import random
import select
import sys

import nbd

socket, structured, seed = sys.argv[1], sys.argv[2] == "structured", int(sys.argv[3])
rng = random.Random(seed)
h = nbd.NBD()
h.set_request_structured_replies(structured)
h.connect_unix(socket)
size = h.get_size()
SECTOR = 512
known = bytearray(h.pread(size, 0))

number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    taken, flights = [], []
    for _ in range(24):
        sectors = rng.choice([1, 1, 8, 8, 64, 700, 2300])
        at = rng.randrange(size // SECTOR - sectors) * SECTOR
        end = at + sectors * SECTOR
        # What overlaps is not in flight together.
        if any(at < e and a < end for a, e in taken):
            continue
        taken.append((at, end))
        what = rng.choice(["write", "read", "read", "zero", "trim", "flush"])
        if what == "write":
            data = rng.randbytes(end - at)
            known[at:end] = data
            cookie = h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), at)
            flights.append((cookie, None))
        elif what == "read":
            buffer = nbd.Buffer(end - at)
            cookie = h.aio_pread(buffer, at)
            flights.append((cookie, (buffer, at, end)))
        elif what == "zero":
            known[at:end] = bytes(end - at)
            flights.append((h.aio_zero(end - at, at), None))
        elif what == "flush":
            flights.append((h.aio_flush(), None))
    while flights:
        h.poll(-1)
        # An error of any request is an exception here.
        done = [one for one in flights if h.aio_command_completed(one[0])]
        flights = [one for one in flights if one not in done]
        for _, read in done:
            if read:
                buffer, at, end = read
                assert buffer.to_bytearray() == known[at:end], (number, at, end)
    number += 1
    print("round", number, flush=True)
h.shutdown()
