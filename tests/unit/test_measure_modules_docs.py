"""What the measuring modules document is what they take and return."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import sglang_diagnose
import sglang_health
import sglang_throughput
import yaml

MODULES = [sglang_diagnose, sglang_health, sglang_throughput]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_options_are_the_argument_spec(module: ModuleType) -> None:
    documented: dict[str, Any] = yaml.safe_load(module.DOCUMENTATION)["options"]
    assert set(documented) == set(module.ARGUMENTS)
    for name, spec in module.ARGUMENTS.items():
        for key in ("type", "default", "choices", "elements", "required"):
            assert documented[name].get(key) == spec.get(key), (name, key)
        assert documented[name]["description"]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_examples_use_documented_options(module: ModuleType) -> None:
    for task in yaml.safe_load(module.EXAMPLES):
        assert set(task[module.__name__]) <= set(module.ARGUMENTS)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_returns_and_attributes_are_documented(module: ModuleType) -> None:
    documentation = yaml.safe_load(module.DOCUMENTATION)
    assert {"check_mode", "diff_mode"} <= set(documentation["attributes"])
    for name, value in yaml.safe_load(module.RETURN).items():
        assert value["description"], name
        assert value["type"], name
        assert value["returned"], name
