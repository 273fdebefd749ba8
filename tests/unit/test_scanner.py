"""The scanner reads conditions as they are meant, and misses none of the forms that gates take."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
import wheels
from ansible.module_utils.sm120 import packages, scan_values, scanner
from ansible.module_utils.sm120.manifest import Manifest
from ansible.module_utils.sm120.scan_cuda import cuda_conditions
from ansible.module_utils.sm120.scan_python import python_conditions
from ansible.module_utils.sm120.survey import survey

pytestmark = pytest.mark.once

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
    ("10 * capability[0] + capability[1] >= 100", "10.0 10.3 11.0 12.0 12.1"),
    ("(found := get_device_capability())[0] == 9", "9.0"),
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


GUARDS = [
    ("backend == 'trtllm' and not (is_sm90_supported() or is_sm100_supported())", "9.0 10.0 10.3"),
    ("world_size > 8 or not is_sm90_supported()", "9.0"),
    ("is_sm120_supported() and tp_size > 4", "8.0 8.9 9.0 10.0 10.3 11.0"),
]


@pytest.mark.parametrize(("condition", "admits"), GUARDS)
def test_a_guard_with_another_reason_turns_away_what_the_capability_decides(
    condition: str, admits: str
) -> None:
    (found,) = python_conditions(f"def f():\n    if {condition}:\n        raise ValueError\n")
    assert (found.first, found.form, found.admits) == (2, "guard", tuple(admits.split()))


RENAMED = [
    ("cap = get_device_capability()\nif cap[0] == 9:\n    pass\n", 2, "9.0"),
    ("cap = (\n    get_device_capability()\n)\nif cap[0] == 9:\n    pass\n", 4, "9.0"),
    (
        "cap: tuple = get_device_capability() if here else (0, 0)\nready = cap >= (10, 3)\n",
        2,
        "10.3 11.0 12.0 12.1",
    ),
    ("high, low = get_device_capability()\nif high in (9, 10) and low < 3:\n    pass\n", 2, "9.0 10.0"),
    ("OURS = [9, 10]\nif get_device_capability()[0] in OURS:\n    pass\n", 2, "9.0 10.0 10.3"),
    (
        "OURS = frozenset({(9, 0), (10, 0)})\nif get_device_capability() not in OURS:\n    raise X\n",
        2,
        "9.0 10.0",
    ),
    ("class A:\n    OURS = (9,)\n    def f(self):\n        return major in self.OURS\n", 4, "9.0"),
    (
        "class A:\n    def f(self):\n        self.cap = get_device_capability()\n"
        "    def g(self):\n        return self.cap == (9, 0)\n",
        5,
        "9.0",
    ),
    ("OURS = [9, 10]\ng(supported_major_versions=OURS)\n", 2, "9.0 10.0 10.3"),
]


@pytest.mark.parametrize(("text", "line", "admits"), RENAMED)
def test_another_name_is_seen_through(text: str, line: int, admits: str) -> None:
    assert [(each.first, each.admits) for each in python_conditions(text)] == [(line, tuple(admits.split()))]


def test_a_name_stands_for_what_it_was_set_to_last_and_in_its_function() -> None:
    text = (
        "def f():\n    cap = get_device_capability()\n    cap = limit()\n    return cap[0] == 9\n"
        "def g(cap):\n    return cap[0] == 9\n"
        "OURS = [9]\nOURS = [10]\nready = major in OURS\n"
    )
    assert python_conditions(text) == []


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
    expected = {each.gate.id for each in findings if each.variant and each.variant.kind != "absent"}
    # Upstream opened it by an entry in a list, which is no condition.
    opened = {each.gate.id for each in findings if each.variant and each.variant.kind == "native"}
    assert expected - ({"moe.autotune"} & opened) <= seen
    for condition in conditions:
        if condition.gate in opened - {"fusion.workspace_multicast"}:  # asked where multicast is wanted
            assert condition.sm120, condition
    closed = {each.gate.id for each in findings if each.variant and each.variant.kind == "edit"}
    for condition in conditions:
        if condition.gate in closed and condition.form not in ("definition", "condition", "guard"):
            assert not condition.sm120
    assert [condition.as_dict() for condition in scanner.unlisted(conditions)] == []


PLANTED = [
    (
        FUSION,
        "\nif get_platform().is_sm100 and server_args.moe_runner_backend == 'flashinfer_cutlass':\n    ready = 1\n",
    ),
    (
        FUSION,
        "\nif get_platform().is_sm100 and moe_runner_backend == 'flashinfer_cutlass':\n    moe_runner_backend = 'x'\n",
    ),
    (
        FUSION,
        "\nif backend == 'trtllm' and not (is_sm90_supported() or is_sm100_supported()):\n    raise ValueError\n",
    ),
    (FUSION, "\nif get_device_capability()[0] in OURS:\n    ready = 1\nOURS = [9, 10]\n"),
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


def test_a_renamed_capability_is_unlisted_where_it_is_compared(make_site: Any) -> None:
    site = make_site("0.5.23", "0.7.2")
    keep_only_unpacked(site)
    path = site / FUSION
    line = path.read_text().count("\n") + 1
    text = "\ndef planted():\n    cap = get_device_capability()\n    if cap[0] == 9:\n        return 1\n"
    wheels.deliver(site, FUSION, path.read_bytes() + text.encode())
    conditions, _ = scanned(site)
    assert [(each.line, each.text) for each in scanner.unlisted(conditions) if each.path == str(path)] == [
        (line + 3, "cap[0] == 9")
    ]


def test_the_pick_of_moe_kernels_for_a_model_is_the_listed_gate(make_site: Any) -> None:
    site = make_site("0.5.23", "0.7.2")
    keep_only_unpacked(site)
    relative = "sglang/srt/arg_groups/overrides.py"
    text = (
        "\ndef planted():\n    if get_platform().is_sm100 and cfg.moe_runner_backend == 'auto':\n"
        "        overrides['moe_runner_backend'] = 'flashinfer_trtllm'\n"
    )
    wheels.deliver(site, relative, (site / relative).read_bytes() + text.encode())
    conditions, _ = scanned(site)
    assert [each.gate for each in conditions if each.within == "planted"] == ["moe.runner_auto"]


def keep_only_unpacked(site: Path) -> None:
    """Let RECORD list what is there, as if the wheel held nothing else."""
    for record in site.glob("*.dist-info/RECORD"):
        lines = [
            line
            for line in record.read_text().splitlines()
            if (site / line.split(",")[0].strip('"')).exists()
        ]
        record.write_text("\n".join(lines) + "\n")


def test_a_file_that_git_tracks_and_that_is_gone_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "python/sglang"
    (root / "srt").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "version.py").write_text('__version__ = "0.5.9"\n')
    for name in ("kept", "gone"):
        (root / f"srt/{name}.py").write_text("ready = major == 9\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)
    (root / "srt/new.py").write_text("ready = major == 10\n")  # not committed yet, and imported all the same
    package = packages.by_root("sglang", root)
    assert package.source == "git"
    found = [Path(each.path).name for each in scanner.scan_package(package)]
    assert sorted(found) == ["gone.py", "kept.py", "new.py"]
    (root / "srt/gone.py").unlink()
    with pytest.raises(scanner.ScanProblem, match=r"srt/gone\.py was delivered .* and is missing"):
        scanner.scan_package(package)
    subprocess.run(["git", "-C", str(tmp_path), "rm", "-q", "python/sglang/srt/gone.py"], check=True)
    with pytest.raises(scanner.ScanProblem, match="is missing"):
        scanner.scan_package(package)
