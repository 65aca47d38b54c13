"""Models by name: what is wrong with a folder is said in one line."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import HfApi, constants

from outpace import InputError, ModelError, UnknownNameError, load
from outpace.models import loading
from outpace.models.loading import of_hub

from .models import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without a tokenizer."""
    tiny("Llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2"])  # for some, transformers creates an empty one
def test_no_tokenizer(tmp_path: Path, name: str) -> None:
    tiny(name).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer.*The folder needs tokenizer files"):
        load(tmp_path, device="cpu")


def test_broken_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="complete safetensors weights"):
        load(folder, device="cpu")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load(folder, device="cpu")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path, device="cpu")


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="Give the folder"):
        load(folder / "config.json", device="cpu")


@pytest.mark.parametrize("name", ["smollm2", "/no/such/folder", "./model"])
def test_no_such_model(name: str) -> None:
    with pytest.raises(UnknownNameError, match="smollm2-135m"):
        load(name, device="cpu")


def test_device_and_dtype() -> None:
    with pytest.raises(InputError, match="device 'gpu'"):
        loading.resolve_device("gpu")
    with pytest.raises(UnknownNameError, match="bfloat16"):
        loading.resolve_dtype("bf16", torch.device("cpu"))
    assert loading.resolve_dtype(None, torch.device("cpu")) == torch.float32
    assert loading.resolve_dtype(None, torch.device("cuda")) == torch.bfloat16
    with pytest.raises(InputError, match="loaded by name"):
        load(tiny("Llama"), dtype="float32")


@pytest.mark.parametrize("quicker", [torch.float32, torch.bfloat16])
def test_the_fastest_dtype_is_measured(quicker: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.product_time(torch.float32) > 0
    monkeypatch.setattr(loading, "product_time", lambda dtype: 1.0 if dtype is quicker else 2.0)
    assert loading.resolve_dtype("fastest", torch.device("cpu")) is quicker
    assert loading.resolve_dtype("fastest", torch.device("cuda")) is torch.bfloat16


def test_an_embedded_model_stays_packed_to_write_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = loading.bundled.NAMES[0]
    assert loading.usual_weights(embedded, None, "cpu", "auto") == loading.PACKED
    assert loading.usual_weights("owner/other", None, "cpu", "auto") == loading.NARROW
    for name, dtype, runtime in ((embedded, "float32", "auto"), (embedded, None, "compiled"), ("o/o", None, "plain")):
        assert loading.usual_weights(name, dtype, "cpu", runtime) is None
    monkeypatch.setattr(loading.products, "compiler", lambda: None)
    assert loading.usual_weights(embedded, None, "cpu", "auto") is None


def test_an_older_version_left_no_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no GGUF file beside the converted one yet."""
    fetched = tmp_path / "fetched"
    fetched.write_bytes(b"GGUF")
    entry = loading.bundled.describe(loading.bundled.NAMES[0])
    monkeypatch.setattr(loading.bundled, "ensure", lambda name, cache: tmp_path / name)
    monkeypatch.setattr(loading.bundled, "_fetch", lambda entry, staging: fetched)
    (tmp_path / entry.name).mkdir()
    assert loading.bundled.ensure_gguf(entry.name, tmp_path).read_bytes() == b"GGUF"


class TestHub:
    ID = "somebody/some-model"

    def test_without_a_network(self) -> None:
        with pytest.raises(ModelError, match=r"http://127.0.0.1:9 cannot be reached.*Give a model folder"):
            of_hub(self.ID, HfApi("http://127.0.0.1:9"))

    def test_without_a_network_downloaded_files_are_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        known = tmp_path / "models--somebody--some-model"
        for file, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
            (known / file).parent.mkdir(parents=True)
            (known / file).write_text(text)
        assert of_hub(self.ID, HfApi("http://127.0.0.1:9")) == str(known / "snapshots" / "abc")

    @pytest.mark.parametrize("status", [200, 401, 404])
    def test_any_answer_is_left_to_transformers(self, status: int) -> None:
        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b'{"id": "somebody/some-model"}')

        with HTTPServer(("127.0.0.1", 0), Answers) as server:
            thread = Thread(target=server.handle_request)
            thread.start()
            assert of_hub(self.ID, HfApi(f"http://127.0.0.1:{server.server_port}")) == self.ID
            thread.join()
