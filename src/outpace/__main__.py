"""`python -m outpace` is the command line, and with torchrun's `-m outpace` it runs on several ranks."""

from .cli import main

main()
