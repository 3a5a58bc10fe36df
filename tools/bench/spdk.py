"""SPDK's vhost, which distributions have no package of: its program is given by an option."""

import json
import shutil
from pathlib import Path

from process import Failed, run

BLOCK = 512
# Megabytes, nearly all of them for buffers that a front-end's requests have no use for.
MEMORY = 1024
# What a front-end has to do without.
LOAD = ["--no-event-idx"]


def problem(program: str) -> str | None:
    """Why it cannot be measured."""
    if shutil.which(program) is None:
        return f"{program} is no program"
    try:
        options = run([program, "--help"], 10)
    except (Failed, OSError):
        options = ""
    if "--no-huge" in options and "vhost" in options:
        return None
    return f"{program} is not SPDK's vhost, version 24.01 or later"


def config(disk: Path | int, controller: str) -> dict:
    """A controller's disk: a file, or so many bytes of nothing. Files are served by the module that
    is part of every build, Linux AIO, which is no slower than that with io_uring."""
    params = {"name": "disk", "block_size": BLOCK}
    if isinstance(disk, int):
        made = {"method": "bdev_null_create", "params": params | {"num_blocks": disk // BLOCK}}
    else:
        made = {"method": "bdev_aio_create", "params": params | {"filename": str(disk)}}
    served = {"method": "vhost_create_blk_controller",
              "params": {"ctrlr": controller, "dev_name": "disk"}}
    return {"subsystems": [{"subsystem": "bdev", "config": [made]},
                           {"subsystem": "vhost_blk", "config": [served]}]}


def server(program: str, disk: Path | int, socket: Path, cpu: int) -> list:
    """It polls on the CPU at all times. Without huge pages, which not every machine has to spare:
    they would be for its own memory, not for a front-end's. In RUNTIME_DIRECTORY it leaves a
    directory each time."""
    file = socket.with_name("spdk.json")
    file.write_text(json.dumps(config(disk, socket.name)), encoding="utf-8")
    return ["env", f"RUNTIME_DIRECTORY={socket.parent}", program, "--cpumask", f"[{cpu}]",
            "--no-pci", "--no-huge", "--iova-mode", "va", "--mem-size", MEMORY, "--config", file,
            "--rpc-socket", socket.with_name("rpc.sock"), "-S", socket.parent]
