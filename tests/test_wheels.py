"""The wheels: the package alone is small, heads come in a wheel of their own, and both work once installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import outpace
from outpace import OutpaceWarning
from outpace.heads import shipped
from outpace.heads.shipped import CHECKOUT

ROOT = Path(__file__).parents[1]
PROJECTS = {"outpace": ROOT, "outpace_smollm2": ROOT / "packages" / "outpace-smollm2"}
PIP = [sys.executable, "-m", "pip"]
MOST = 1_500_000  # bytes of the package without heads


def pip_wheel(source: Path, folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: pip_wheel(source, tmp_path_factory.mktemp(name)) for name, source in PROJECTS.items()}


def test_the_package_is_small_and_typed_and_whole(wheels: dict[str, Path]) -> None:
    assert wheels["outpace"].stat().st_size < MOST
    inside = names_in(wheels["outpace"])
    source = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src" / "outpace").rglob("*") if file.is_file()}
    wanted = {name for name in source if "__pycache__" not in name and not name.startswith("outpace/trained")}
    assert {name for name in inside if ".dist-info" not in name} == wanted
    assert "outpace/py.typed" in wanted


def test_heads_are_in_a_wheel_of_their_own(wheels: dict[str, Path]) -> None:
    inside = names_in(wheels["outpace_smollm2"])
    heads = {str(file.relative_to(CHECKOUT)) for file in CHECKOUT.rglob("*") if file.is_file()}
    assert {f"outpace_smollm2/trained/{name}" for name in heads} <= inside
    assert len(heads) > 8


@pytest.mark.parametrize("name", ["outpace", pytest.param("outpace_smollm2", marks=pytest.mark.slow)])
def test_a_source_archive_gives_the_same_wheel(wheels: dict[str, Path], name: str, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, check=True, cwd=PROJECTS[name], capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    assert names_in(pip_wheel(archive, tmp_path)) == names_in(wheels[name])


class Environment:
    """A virtual environment where nothing of this checkout is. What the wheels depend on is lent: torch takes long."""

    def __init__(self, home: Path) -> None:
        self.home, self.place = home, home / "environment"
        venv.create(self.place, with_pip=False)
        self.python = str(self.place / "bin" / "python")
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.place)}))
        (self.packages / "lent.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read

    def install(self, *what: str, cwd: Path | None = None) -> None:
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed"]  # what is lent may have them
        subprocess.run([*PIP, "--python", self.python, "install", *options, *what], check=True, cwd=cwd)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        bare = {"PATH": f"{self.place / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())}
        done = subprocess.run(command, env=bare, cwd=cwd or self.home, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


def test_both_work_in_an_environment_of_their_own(wheels: dict[str, Path], tmp_path: Path) -> None:
    there = Environment(tmp_path)
    there.install(*map(str, wheels.values()))
    assert there.run("outpace", "--version") == f"outpace {outpace.__version__}\n"
    found = there.run("python", "-c", "from outpace.heads.shipped import of_kind; print(*of_kind('amphista'))").strip()
    assert found == str(there.packages / "outpace_smollm2" / "trained" / "smollm2-135m" / "amphista")


def test_a_package_whose_heads_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module:FOLDER", shipped.GROUP)
    monkeypatch.setattr(shipped, "entry_points", lambda group: [broken])
    shipped.folders.cache_clear()
    with pytest.warns(OutpaceWarning, match="no_such_module"):
        assert shipped.folders() == (CHECKOUT,)
    shipped.folders.cache_clear()
