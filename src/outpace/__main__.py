"""The command line as a module: `python -m outpace`, or `torchrun -m outpace` for several ranks."""

from .cli import main

main()
