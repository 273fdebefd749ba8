"""The role preflight, by ansible-playbook on this machine: what its one message says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

PLAY = """
- hosts: localhost
  gather_facts: false
  roles: [preflight]
"""


def told(tmp_path: Path, **variables: Any) -> str:
    """What the role refused on a machine that has no other fault than these."""
    (tmp_path / "play.yml").write_text(PLAY)
    given = {"ansible_python_interpreter": sys.executable, "sglang_runtime_device": "cpu", **variables}
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", "localhost,", "-c", "local", "-e", json.dumps(given), str(tmp_path / "play.yml")),
        ],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Nothing was changed. To correct:" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("config", "size"),
    [({"thinker_config": {"text_config": {"vocab_size": 32}}}, "32"), ([1], "")],
)
def test_misspelt_names_keys_and_vocabularies(tmp_path: Path, config: Any, size: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    said = told(
        tmp_path,
        sglang_server_prot=30001,
        sglang_zzz=1,
        sglang_server_instances=[{"instance": "chat", "api_key": "s3cret-key\n"}],
        sglang_model_path=str(tmp_path / "model"),
        sglang_verify_vocab_size=2048,
    )
    assert "sglang_server_prot (did you mean sglang_server_port?)" in said
    assert "sglang_zzz" in said
    assert "sglang_zzz (did" not in said
    assert "wanted: sglang_server_api_key as one line" in said
    assert "s3cret-key" not in said
    assert (f"of at most the model's vocabulary ({size})" in said) is bool(size)
