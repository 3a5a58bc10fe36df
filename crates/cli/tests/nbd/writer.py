# Writes until the server dies, by two connections, and keeps in STATE what
# each block may contain: nothing older than what a flush has covered. The
# blocks lie far apart, so that most writes to an image need a new cluster.
BLOCK, STRIDE, BLOCKS = 4096, 64 << 10, 60000
handles = [connect(), connect()]
rng = random.Random(int(os.environ.get("FATHOM_SEED", "0") or 0) + 7)
sent, flushed = [0] * BLOCKS, [0] * BLOCKS
generation = 0
try:
    while True:
        # Written by either, flushed by one: the flush covers both.
        for _ in range(rng.randrange(1, 60)):
            block = rng.randrange(BLOCKS)
            generation += 1
            data = struct.pack(">QQ", block, generation) * (BLOCK // 16)
            sent[block] = generation
            fua = nbd.CMD_FLAG_FUA if rng.randrange(50) == 0 else 0
            rng.choice(handles).pwrite(data, block * STRIDE, fua)
            if fua:
                flushed[block] = generation
        rng.choice(handles).flush()
        flushed = list(sent)
        print(generation, flush=True)
except nbd.Error:
    pass
with open(os.environ["STATE"], "w") as file:
    for pair in zip(flushed, sent):
        print(*pair, file=file)
