"""`jaxllm <command> ...` and `python -m jaxllm <command> ...`: the same as `python -m jaxllm.<command> ...`."""

import importlib
import sys

COMMANDS = ("train", "plan", "data", "convert", "config")


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: jaxllm {{{','.join(COMMANDS)}}} ...    (jaxllm <command> --help)", file=sys.stderr)
        return 0 if sys.argv[1:2] in (["--help"], ["-h"]) else 2
    name = sys.argv[1] + (".__main__" if sys.argv[1] == "data" else "")  # a folder
    return importlib.import_module(f"jaxllm.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
