"""The console script ``vllm-dartree``; each command is a module of this package."""

import argparse
import sys

from vllm_dartree import __version__
from vllm_dartree.cli import check, compare, demo, emulate


def main(argv: list[str] | None = None) -> int:
    """Runs one command; a mistake of the person who typed it is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="vllm-dartree", description="Tree speculation for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-dartree {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, check, emulate, compare):
        name = command.__name__.rpartition(".")[2]
        child = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"vllm-dartree {args.command}: error: {error}", file=sys.stderr)
        return 2
