"""`nexus-vllm COMMAND`: every command is a module of this package with `add_to(commands)`."""

import argparse
from collections.abc import Sequence

import nexus_vllm
from nexus_vllm.tools import bench, doctor, evaluate, profile, soak


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="nexus-vllm", description=nexus_vllm.__doc__)
    parser.add_argument("--version", action="version", version=nexus_vllm.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (doctor, profile, evaluate, bench, soak):
        command.add_to(commands)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code
