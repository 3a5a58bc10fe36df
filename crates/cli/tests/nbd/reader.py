# Compares the disk with what the writer left in STATE.
BLOCK, STRIDE = 4096, 64 << 10
h = connect()
with open(os.environ["STATE"]) as file:
    state = [tuple(map(int, line.split())) for line in file]
assert any(flushed for flushed, _ in state)
for block, (flushed, sent) in enumerate(state):
    if not sent:
        continue
    data = h.pread(BLOCK, block * STRIDE)
    for at in range(0, BLOCK, 512):
        sector = data[at:at + 512]
        number, generation = struct.unpack(">QQ", sector[:16])
        assert sector == sector[:16] * 32, f"block {block}: damaged at {at}"
        assert number == block or not generation, f"block {block}: data of block {number}"
        assert flushed <= generation <= sent, \
            f"block {block}: generation {generation}, flushed {flushed}, sent {sent}"
h.shutdown()
