#!/usr/bin/env python3
"""Prints how many lines of each source file were reached, from what `llvm-cov export --summary-only` prints."""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates"


def main():
    files = json.load(sys.stdin)["data"][0]["files"]
    total = reached = 0
    for file in sorted(files, key=lambda file: file["filename"]):
        path, lines = pathlib.Path(file["filename"]), file["summary"]["lines"]
        if path.is_relative_to(ROOT) and lines["covered"]:
            total, reached = total + lines["count"], reached + lines["covered"]
            print(f"{lines['covered']:6} of {lines['count']:5}  {path.relative_to(ROOT)}")
    print(f"{reached:6} of {total:5}  in files of which some line is reached")


if __name__ == "__main__":
    main()
