"""The scanner reads conditions as they are meant, and misses none of the forms that gates take."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import wheels
from ansible.module_utils.sm120 import packages, scan_values, scanner
from ansible.module_utils.sm120.manifest import Manifest
from ansible.module_utils.sm120.scan_cuda import cuda_conditions
from ansible.module_utils.sm120.scan_python import python_conditions
from ansible.module_utils.sm120.survey import survey
from gates_driver import Gates, RunModule

FUSION = "sglang/srt/layers/flashinfer_comm_fusion.py"
HEADER = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce_fusion.cuh"

EXPRESSIONS = [
    ("is_sm90_supported() or is_sm100_supported()", "9.0 10.0 10.3"),
    ("get_platform().is_sm90 and other", "9.0"),
    ("_is_sm100_supported", "10.0 10.3"),
    ("is_sm100_or_sm110_supported()", "10.0 10.3 11.0"),
    ("get_platform().is_blackwell", "10.0 10.3 11.0 12.0 12.1"),
    ("get_device_capability() == (9, 0)", "9.0"),
    ("torch.cuda.get_device_capability()[0] >= 10", "10.0 10.3 11.0 12.0 12.1"),
    ("get_device_capability() in ((9, 0), (10, 0))", "9.0 10.0"),
    ("(8, 0) <= get_device_capability() < (10, 0)", "8.0 8.9 9.0"),
    ("major in (9, 10)", "9.0 10.0 10.3"),
    ("major == 12", "12.0 12.1"),
    ("9 <= major", "9.0 10.0 10.3 11.0 12.0 12.1"),
    ("SM_VERSION < 120", "8.0 8.9 9.0 10.0 10.3 11.0"),
    ("sm_version not in (100, 103)", "8.0 8.9 9.0 11.0 12.0 12.1"),
    ("cc >= 9.0 and cc < 12.0", "9.0 10.0 10.3 11.0"),
    ("arch == 'sm_90a'", "9.0"),
    ("not (is_sm90_supported() or is_sm100_supported())", "8.0 8.9 11.0 12.0 12.1"),
]


@pytest.mark.parametrize(("expression", "admits"), EXPRESSIONS)
def test_values_that_an_expression_admits(expression: str, admits: str) -> None:
    assert scan_values.admitted(ast.parse(expression, mode="eval").body) == admits.split()


@pytest.mark.parametrize("expression", ["batch_size > 9", "other or is_cuda()", "len(majority) == 9", "True"])
def test_what_does_not_depend_is_no_condition(expression: str) -> None:
    assert scan_values.admitted(ast.parse(expression, mode="eval").body) is None
    assert python_conditions(f"if {expression}:\n    pass\n") == []


def test_a_guard_admits_what_it_does_not_turn_away() -> None:
    text = "def f():\n    if not (is_sm90_supported() or is_sm100_supported()):\n        raise ValueError\n"
    (found,) = python_conditions(text)
    assert (found.first, found.form, found.within) == (2, "guard", "f")
    assert found.admits == ("9.0", "10.0", "10.3")


def test_decorators_lists_comments_and_multicast() -> None:
    text = (
        "@supported_compute_capability([90, 100])\ndef f():\n    pass\n"
        "g(supported_major_versions=[9, 10])\nL = [\n    'a',\n    # 'b',\n]\ncuda.cuMulticastGetGranularity(x)\n"
    )
    found = [(each.first, each.form, each.admits) for each in python_conditions(text)]
    assert found == [
        (1, "list supported_compute_capability", ("9.0", "10.0", "10.3")),
        (4, "list supported_major_versions", ("9.0", "10.0", "10.3")),
        (7, "commented out of a list", ("9.0", "10.0")),
        (9, "multicast", ("9.0", "10.0", "10.3")),
    ]


def test_a_condition_speaks_of_what_is_near_it() -> None:
    table = "TABLE = [\n" + "    'csrc/sm_90a/kernel.cu',\n" * 3000 + "]\n"
    found = python_conditions(
        f"def f():\n    # moe_runner_backend\n    if major == 9:\n        pass\n{table}"
    )
    assert len(found) == 3001
    assert max(each.statement.count("\n") for each in found) < 100


@pytest.mark.parametrize(
    ("directive", "admits"),
    [
        (
            "#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900) && (__CUDA_ARCH__ < 1200))",
            "9.0 10.0 10.3 11.0",
        ),
        ("#if defined(__CUDA_ARCH__) && \\\n    (__CUDA_ARCH__ == 900)", "9.0"),
        (
            "#  elif __CUDA_ARCH__ >= 1000 || defined(FORCE) // comment",
            "8.0 8.9 9.0 10.0 10.3 11.0 12.0 12.1",
        ),
        ("#if !(__CUDA_ARCH__ < 1000)", "10.0 10.3 11.0 12.0 12.1"),
    ],
)
def test_preprocessor_conditions(directive: str, admits: str) -> None:
    found = list(cuda_conditions(f"int x;\n{directive}\nint y;\n#endif\n"))
    assert [(each.first, each.admits) for each in found] == [(2, tuple(admits.split()))]


def test_directives_that_ask_for_device_code_only_are_no_condition() -> None:
    assert list(cuda_conditions("#ifdef __CUDA_ARCH__\n#endif\n#if defined(__CUDA_ARCH__)\n#endif\n")) == []


def scanned(site: Path) -> tuple[list[scanner.Condition], Any]:
    found = {name: packages.by_root(name, site / name) for name in ("sglang", "flashinfer")}
    state = survey(found, Manifest(), site)
    return scanner.scan(found, state.findings), state.findings


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Everything that is scanned, of the two release sets."""
    sites = {}
    for sglang, flashinfer in (("0.5.9", "0.6.3"), ("0.5.23", "0.7.2")):
        site = tmp_path_factory.mktemp("whole") / "site"
        wheels.unpack("sglang", sglang, site, lambda name: scanner.reader_for(name) is not None)
        wheels.unpack("flashinfer", flashinfer, site, lambda name: scanner.reader_for(name) is not None)
        sites[sglang] = site
    return sites


@pytest.mark.parametrize("sglang", ["0.5.9", "0.5.23"])
def test_every_gate_of_the_catalogue_is_found_and_nothing_else_is_left(
    whole: dict[str, Path], sglang: str
) -> None:
    conditions, findings = scanned(whole[sglang])
    seen = {condition.gate for condition in conditions}
    expected = {each.gate.id for each in findings if each.variant and each.variant.kind in ("edit", "listed")}
    assert expected <= seen
    closed = {each.gate.id for each in findings if each.variant and each.variant.kind == "edit"}
    for condition in conditions:
        if condition.gate in closed and condition.form not in ("definition", "condition", "guard"):
            assert not condition.sm120
    assert [condition.as_dict() for condition in scanner.unlisted(conditions)] == []


PLANTED = [
    (FUSION, "\nif get_device_capability() == (9, 0):\n    ready = 1\n"),
    (FUSION, "\nif major in (9, 10):\n    ready = 1\n"),
    (FUSION, "\nif SM_VERSION < 120:\n    ready = 1\n"),
    (FUSION, "\nready = is_sm90_supported() or is_sm100_supported()\n"),
    (HEADER, "\n#if defined(__CUDA_ARCH__) && \\\n    (__CUDA_ARCH__ < 1200)\n#endif\n"),
]


@pytest.mark.parametrize(("relative", "text"), PLANTED)
def test_a_planted_gate_is_unlisted(make_site: Any, relative: str, text: str) -> None:
    def wanted(name: str) -> bool:
        return name in (FUSION, HEADER, "flashinfer/jit/core.py")

    site = make_site("0.5.23", "0.7.2")
    for package, version in (("sglang", "0.5.23"), ("flashinfer", "0.7.2")):
        wheels.unpack(package, version, site, wanted)
    keep_only_unpacked(site)
    path = site / relative
    line = path.read_text().count("\n") + 2
    wheels.deliver(site, relative, path.read_bytes() + text.encode())
    conditions, _ = scanned(site)
    found = [each for each in scanner.unlisted(conditions) if each.path == str(path)]
    assert [each.line for each in found] == [line]
    assert not found[0].sm120


def keep_only_unpacked(site: Path) -> None:
    """Let RECORD list what is there, as if the wheel held nothing else."""
    for record in site.glob("*.dist-info/RECORD"):
        lines = [
            line
            for line in record.read_text().splitlines()
            if (site / line.split(",")[0].strip('"')).exists()
        ]
        record.write_text("\n".join(lines) + "\n")


def test_a_missing_file_is_an_error(make_site: Any, run_module: RunModule) -> None:
    site = make_site("0.5.9", "0.6.3")
    answer = Gates(run_module, site).info(scan=True)
    assert any("is missing" in problem for problem in answer["problems"])
    assert answer["conditions"] == []
    keep_only_unpacked(site)
    assert Gates(run_module, site).info(scan=True)["conditions"] != []
    (site / "sglang/srt/server_args.py").unlink()
    assert "server_args.py" in Gates(run_module, site).info(scan=True)["problems"][0]
