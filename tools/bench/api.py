"""A server's API on its Unix socket."""

import http.client
import json
import socket
from pathlib import Path

from process import Failed


class Api(http.client.HTTPConnection):
    """A connection, which stays open between requests."""

    def __init__(self, path: Path):
        super().__init__("fathom", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))

    def ask(self, method: str, place: str, body: dict | None = None) -> dict | None:
        """The reply's JSON, if it has any."""
        self.request(method, place, body and json.dumps(body))
        answer = self.getresponse()
        said = answer.read()
        if answer.status >= 300:
            raise Failed(f"{method} {place}: {said.decode()}")
        return json.loads(said) if said else None
