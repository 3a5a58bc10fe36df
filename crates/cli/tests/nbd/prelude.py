# What the scripts share. URI is the disk's, which is all zeroes at first.
import errno, os, random, struct, sys
import nbd

URI = os.environ["URI"]


def connect(strict=True, uri=URI):
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    if not strict:
        h.set_strict_mode(0)
    h.connect_uri(uri)
    return h


def extents(h, count, offset, flags=0):
    """(offset, length, state) of all extents."""
    found, end = [], offset + count
    while offset < end:
        answer = []
        def note(context, at, entries, error):
            assert context == nbd.CONTEXT_BASE_ALLOCATION and at == offset, (context, at)
            answer.extend(zip(entries[::2], entries[1::2]))
        h.block_status(end - offset, offset, note, flags)
        assert answer, "at least one extent"
        if flags & nbd.CMD_FLAG_REQ_ONE:
            assert len(answer) == 1 and answer[0][0] <= end - offset, answer
        for length, state in answer:
            assert length > 0 and state & ~3 == 0, answer
            found.append((offset, length, state))
            offset += length
        assert offset <= h.get_size(), "no extent passes the end"
    return found


def refused(call, *errors):
    """`call` fails with one of these error numbers."""
    try:
        call()
    except nbd.Error as e:
        number = getattr(errno, e.errno or "", None)
        assert number in errors, f"{e.errno}, not one of {errors}: {e.string}"
        return
    raise AssertionError(f"not refused: expected one of {errors}")
