#!/usr/bin/env python3
"""Prints the licences of all crates that the program is linked with, and their texts, each once."""

import json
import subprocess
from collections import defaultdict
from pathlib import Path

PROGRAM = "fathom-cli"
NAMES = ("licen[sc]e*", "LICEN[SC]E*", "COPYRIGHT*", "copying*", "COPYING*", "NOTICE*", "UNLICENSE*")


def linked(metadata: dict) -> list[dict]:
    """The packages from elsewhere that end up in the program: those of builds and tests do not."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    todo = [one for one, package in packages.items() if package["name"] == PROGRAM]
    seen = set(todo)
    while todo:
        for need in nodes[todo.pop()]["deps"]:
            is_linked = any(kind["kind"] is None for kind in need["dep_kinds"])
            if is_linked and need["pkg"] not in seen:
                seen.add(need["pkg"])
                todo.append(need["pkg"])
    found = [packages[one] for one in seen if packages[one]["source"]]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def texts(package: dict) -> list[str]:
    """Files beside its manifest that tell of licences."""
    folder = Path(package["manifest_path"]).parent
    files = {file for name in NAMES for file in folder.glob(name) if file.is_file()}
    return [file.read_text(errors="replace").strip() for file in sorted(files)]


def main() -> None:
    command = ["cargo", "metadata", "--format-version", "1", "--locked",
               "--filter-platform", "x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    crates = linked(metadata)
    of_text = defaultdict(list)
    print("The program is linked with these crates of others, of crates.io, and with Rust's standard library")
    print("(MIT or Apache-2.0):\n")
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        print(f"  {name}: {crate['license'] or 'see its text'}")
        for text in texts(crate):
            of_text[text].append(name)
    for text, names in of_text.items():
        print(f"\n{'-' * 78}\n{', '.join(names)}:\n\n{text}")


if __name__ == "__main__":
    main()
