"""The comparison of all systems, as a script; the same as ``vllm-dartree compare``."""

import sys

from vllm_dartree.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
