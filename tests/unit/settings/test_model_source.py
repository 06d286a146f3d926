"""Locating a model's files, and the errors for missing ones."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from baton.settings.base import SettingsError
from baton.settings.model_source import ModelFiles, resolve_model, weight_cache_directories


def make_model(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("{}")
    return directory


def test_a_directory_is_used_unchanged(tmp_path):
    model = make_model(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    assert resolve_model(str(model)) == model


def test_the_router_needs_no_weights(tmp_path):
    model = make_model(tmp_path / "m", "config.json", "tokenizer.json")
    assert resolve_model(str(model), ModelFiles.TEXT) == model
    with pytest.raises(SettingsError, match="safetensors"):
        resolve_model(str(model))


@pytest.mark.parametrize(
    ("names", "words"), [((), "no config.json"), (("config.json", "model.safetensors"), "no tokenizer.json")]
)
def test_an_incomplete_directory_is_refused(tmp_path, names, words):
    with pytest.raises(SettingsError, match=words):
        resolve_model(str(make_model(tmp_path / "m", *names)))


def test_a_drafting_head_needs_no_tokenizer(tmp_path):
    head = make_model(tmp_path / "head", "config.json", "model.safetensors")
    assert resolve_model(str(head), ModelFiles.DRAFT) == head
    bare = make_model(tmp_path / "bare", "config.json", "pytorch_model.bin")
    with pytest.raises(SettingsError, match="safetensors"):
        resolve_model(str(bare), ModelFiles.DRAFT)


def test_a_missing_directory_is_refused_without_asking_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(SettingsError, match="no such directory"):
        resolve_model(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("files", "weights"), [(ModelFiles.TEXT, False), (ModelFiles.ALL, True)])
def test_a_hub_id_is_downloaded_with_only_the_files_needed(tmp_path, monkeypatch, files, weights):
    asked = {}

    def download(name, *, allow_patterns, local_files_only):
        assert not local_files_only
        asked[name] = allow_patterns
        return str(make_model(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name", files) == tmp_path / "m"
    assert ("*.safetensors" in asked["org/name"]) is weights


def test_a_failed_download_gives_a_hint(monkeypatch):
    def offline(name, *, allow_patterns, local_files_only):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SettingsError, match=r"org/name.*cannot be downloaded.*Check the network"):
        resolve_model("org/name")


def test_a_check_downloads_nothing(monkeypatch):
    def only_local(name, *, allow_patterns, local_files_only):
        assert local_files_only
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", only_local)
    with pytest.raises(SettingsError, match=r"org/name.*is not downloaded here"):
        resolve_model("org/name", download=False)


def test_the_bundled_model_needs_no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert (resolve_model("bundled") / "config.json").is_file()


def test_ready_weights_lie_beside_a_model_but_never_in_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    users = tmp_path / "cache" / "baton" / "weights"
    assert weight_cache_directories(tmp_path / "model") == [tmp_path / "model" / ".baton", users]
    assert weight_cache_directories(resolve_model("bundled")) == [users]
