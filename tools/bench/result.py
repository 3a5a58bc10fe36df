"""What a measurement gives."""

from dataclasses import asdict, dataclass


class Failed(Exception):
    """A measurement that gave no figure; the text says why."""


@dataclass
class Result:
    """One measurement. CPU times are per request. Commands on whole images
    have no requests, but an end."""

    iops: float | None
    mb_per_s: float
    p50_us: float | None
    p99_us: float | None
    load_cpu_us: float | None
    server_cpu_us: float | None = None
    others_percent: float = 0.0
    seconds: float | None = None
    cpu_seconds: float | None = None

    def as_dict(self) -> dict:
        return asdict(self)
