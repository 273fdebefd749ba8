"""Mount library/ and module_utils/ as Ansible does, and run a module with arguments inside this process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils
import pytest
from ansible.module_utils.common import warnings as module_warnings
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "library"))
sys.path.insert(0, str(ROOT / "tests" / "support"))
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

RunModule = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunModule:
    """Call a module's main(); returns (exit code, its JSON answer)."""
    # Of this process: a module's answer would tell the warnings of those before it.
    monkeypatch.setattr(module_warnings, "_global_warnings", {})

    def run(
        main: Callable[[], None], *, check: bool = False, diff: bool = False, **args: Any
    ) -> tuple[int, dict[str, Any]]:
        given = {**args, "_ansible_check_mode": check, "_ansible_diff": diff}
        with patch_module_args(given), pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        assert isinstance(code, int)
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="session")
def self_signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, valid for a day, made for this run: (certificate, key)."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def lookup() -> ModuleType:
    """The lookup plugin that tells who runs this and whether a lock's holder is dead."""
    path = ROOT / "roles/sm120_gates/lookup_plugins/sm120_gates_operator.py"
    spec = importlib.util.spec_from_file_location("sm120_gates_operator", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
