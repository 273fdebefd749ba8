from __future__ import annotations

import json

import pytest
from ansible.module_utils.sm120.redact import redact, redact_tree

KEY = "k3y-0123456789"


@pytest.mark.parametrize(
    "text",
    [
        f"server_args=ServerArgs(model_path='/m', api_key='{KEY}', admin_api_key='{KEY}', port=1)",
        f'{{"api_key":"{KEY}","admin_api_key": "{KEY}"}}',
        f"launch_server --api-key {KEY} --admin-api-key={KEY}",
        f"Authorization: Bearer {KEY}",
        f"api-key: {KEY}",
        f"api_key={KEY}",
    ],
)
def test_keys_go_even_when_nobody_named_them(text: str) -> None:
    assert KEY not in redact(text)
    assert "REDACTED" in redact(text)


def test_named_secrets_go_wherever_they_stand() -> None:
    assert redact(f"x{KEY}y", [KEY, None, ""]) == "xREDACTEDy"


def test_an_unset_key_stays_readable() -> None:
    text = "api_key=None, admin_api_key=None, 'api_key': null"
    assert redact(text) == text


def test_a_tree_loses_the_key_at_every_depth() -> None:
    tree = {"api_key": "abc", "a": [{"line": f"api_key='{KEY}'"}, (KEY,)], "n": 1, "api_key_set": True}
    cleaned = redact_tree(tree, [KEY])
    assert KEY not in json.dumps(cleaned)
    assert cleaned["api_key"] == "REDACTED"
    assert cleaned["n"] == 1
    assert cleaned["api_key_set"] is True
