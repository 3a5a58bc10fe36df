# A small read is not held up by large ones that were sent before it. A busy machine may let the
# server find all of them done at once, so that not every round shows it; were they held up, none
# would.
h = connect()
overtook = 0
for _ in range(50):
    order = []
    large = [nbd.Buffer(32 << 20) for _ in range(2)]
    small = nbd.Buffer(4096)
    for buffer in large:
        h.aio_pread(buffer, 0, lambda error: order.append("large") or 1)
    h.aio_pread(small, 0, lambda error: order.append("small") or 1)
    while len(order) < 3:
        h.poll(-1)
    overtook += order[0] == "small"
    if overtook == 2:
        break
assert overtook == 2, overtook
