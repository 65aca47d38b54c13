import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder, so that `lab` is a package

from lab.commands import main  # noqa: E402

main()
