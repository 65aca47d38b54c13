import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # Python puts this folder there, and the package is its name

from lab.commands import main  # noqa: E402

main()
