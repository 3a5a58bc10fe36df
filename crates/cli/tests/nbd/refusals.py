# What a server must refuse, and that the connection goes on after it.
h = connect(strict=False)
SIZE = h.get_size()
M = 1 << 20
READ_ONLY = h.is_read_only()
EINVAL, ENOSPC, EPERM, EOVERFLOW = errno.EINVAL, errno.ENOSPC, errno.EPERM, errno.EOVERFLOW
UNKNOWN_FLAG = 1 << 9


def ignore(*args):
    pass


def alive():
    assert len(h.pread(4096, 0)) == 4096


before = h.pread(M, SIZE - M)
past_the_end = [(1, SIZE), (2, SIZE - 1), (512, SIZE), (1024, SIZE - 512), (512, SIZE + M), (512, 2**63), (512, 2**64 - 512)]
for count, offset in past_the_end:
    refused(lambda: h.pread(count, offset), EINVAL)
    refused(lambda: h.cache(count, offset), EINVAL)
    refused(lambda: h.block_status(count, offset, ignore), EINVAL)
    if not READ_ONLY:
        refused(lambda: h.pwrite(bytes(count), offset), EINVAL, ENOSPC)
        refused(lambda: h.zero(count, offset), EINVAL, ENOSPC)
        refused(lambda: h.trim(count, offset), EINVAL, ENOSPC)
    alive()

# Too long, flags that nobody knows, and flags of other commands.
refused(lambda: h.pread(33 * M, 0, nbd.CMD_FLAG_DF), EINVAL, EOVERFLOW)
refused(lambda: h.pread(512, 0, UNKNOWN_FLAG), EINVAL)
refused(lambda: h.flush(UNKNOWN_FLAG), EINVAL)
refused(lambda: h.cache(512, 0, UNKNOWN_FLAG), EINVAL)
refused(lambda: h.block_status(512, 0, ignore, UNKNOWN_FLAG), EINVAL)
refused(lambda: h.pread(512, 0, nbd.CMD_FLAG_NO_HOLE), EINVAL)
alive()

if READ_ONLY:
    refused(lambda: h.pwrite(bytes(512), 0), EPERM)
    refused(lambda: h.zero(512, 0), EPERM, EINVAL)
    refused(lambda: h.trim(512, 0), EPERM, EINVAL)
else:
    refused(lambda: h.pwrite(bytes(512), 0, UNKNOWN_FLAG), EINVAL)
    refused(lambda: h.pwrite(bytes(512), 0, nbd.CMD_FLAG_DF), EINVAL)
    refused(lambda: h.zero(512, 0, nbd.CMD_FLAG_REQ_ONE), EINVAL)
    refused(lambda: h.trim(512, 0, UNKNOWN_FLAG), EINVAL)
alive()

# Of no bytes: a server may refuse it or not.
for call in (lambda: h.pread(0, 0), lambda: h.pwrite(b"", 0), lambda: h.zero(0, 0),
             lambda: h.trim(0, 0), lambda: h.cache(0, 0), lambda: h.block_status(0, 0, ignore)):
    try:
        call()
    except nbd.Error as e:
        assert e.errno in ("EINVAL", "EPERM"), e
    alive()

assert h.pread(M, SIZE - M) == before, "nothing was written"
h.shutdown()

# Without structured replies errors are told, too.
h = nbd.NBD()
h.set_request_structured_replies(False)
h.set_strict_mode(0)
h.connect_uri(URI)
assert not h.get_structured_replies_negotiated()
refused(lambda: h.pread(512, SIZE), EINVAL)
refused(lambda: h.pread(512, 0, nbd.CMD_FLAG_DF), EINVAL)
refused(lambda: h.block_status(512, 0, ignore), EINVAL, errno.ENOTSUP)
alive()
h.shutdown()

# A payload that is too long may end the connection, but nothing else.
if not READ_ONLY:
    h = connect(strict=False)
    try:
        h.pwrite(bytes(33 * M), 0)
        raise AssertionError("33 MiB were written at once")
    except nbd.Error:
        pass
    h = connect()
    assert h.pread(512, 0) == bytes(512)
    h.shutdown()
