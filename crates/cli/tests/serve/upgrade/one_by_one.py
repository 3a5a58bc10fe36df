"""A client, by TLS if it is given certificates, which reads and writes the block at `at` once for each
line that it is told; "again": by a new connection."""

import sys

import nbd

socket, at, certificates = sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:])
BLOCK = 4096


def connect():
    h = nbd.NBD()
    if certificates:
        h.set_tls(nbd.TLS_REQUIRE)
        h.set_tls_certificates(certificates)
        # It knows no name of a server at a path.
        h.set_tls_verify_peer(False)
    h.connect_unix(socket)
    return h


h = connect()
written = 0
for said in sys.stdin:
    try:
        if said.strip() == "again":
            h = connect()
        assert h.pread(BLOCK, at) == bytes([written]) * BLOCK, written
        written += 1
        h.pwrite(bytes([written]) * BLOCK, at)
        print("done", flush=True)
    except nbd.Error:
        print("ended", flush=True)
