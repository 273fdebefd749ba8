"""A run's JSON as the roles write it, its schema, the page made of it, and thresholds that are refused."""

from __future__ import annotations

import copy
import json
import platform
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.sm120.http import Client
from ansible.module_utils.sm120.ladder import LOW_POWER_NOTE, Ladder
from ansible.module_utils.sm120.measurement import method_of
from ansible.module_utils.sm120.probe_cases import Case
from ansible.module_utils.sm120.probe_report import case_rows
from ansible.module_utils.sm120.throughput import Spec
from conftest import ROOT
from fake_sglang import Fake, serve, stream_reply
from local_play import play

SCHEMA = json.loads((ROOT / "docs/run.schema.json").read_text())
SPECS = yaml.safe_load((ROOT / "roles/sglang_verify/meta/argument_specs.yml").read_text())["argument_specs"]
THRESHOLDS = SPECS["main"]["options"]["sglang_verify_thresholds"]
PROBE = ROOT / "docs/evidence/2026-11-30-h200-x2-flashinfer-0.6.12.json"
EVIDENCE = ROOT / "docs/evidence/2026-11-30-h200-x2-promote.json"
SPEC = Spec("generate", (1, 2), 2, 4, 6, 2, 1, 1, 100, {}, 20.0, 30.0)

# What the roles themselves do after their measurements; the measurements are given as facts.
PLAY = """
- hosts: localhost
  gather_facts: false
  vars:
    sglang_verify_artifacts_dir: "{{ folder }}/x/../artifacts/verify"
    sglang_promote_artifacts_dir: "{{ folder }}/x/../artifacts/promote"
  tasks:
    - ansible.builtin.include_role: {name: sglang_verify, tasks_from: report, public: true}
      vars:
        sglang_verify_report_dir: "{{ __sglang_verify_run_dir }}"
        sglang_verify_report: "{{ __sglang_verify_report }}"
    - ansible.builtin.copy:
        content: "{{ lookup('ansible.builtin.template', root ~ '/roles/sglang_verify/templates/summary.txt.j2') }}"
        dest: "{{ folder }}/summary.txt"
        mode: "0600"
    - ansible.builtin.include_role: {name: sglang_promote, tasks_from: report}
"""
PREFLIGHT = """
- hosts: localhost
  gather_facts: false
  roles: [preflight]
"""


def report(folder: Path, *runs: Path) -> subprocess.CompletedProcess[str]:
    page = [f"--html={folder / 'page.html'}", f"--png={folder / 'page.png'}"]
    command = [sys.executable, str(ROOT / "tools/report.py"), *map(str, runs), *page]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def measured() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rungs and method as sglang_throughput returns them."""
    with serve(Fake()) as fake:
        fake.routes["/generate"] = stream_reply()
        ladder = Ladder(Client(fake.url), SPEC, ca_path=None, sample_gpus=False)
        rungs = [ladder.rung(concurrency) for concurrency in SPEC.concurrency]
    method = method_of(SPEC, seed_given=True, power_note=ladder.power_note, model_vocab_size=100)
    return rungs, method


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, measured: tuple[list[dict[str, Any]], dict[str, Any]]
) -> dict[str, Path]:
    """The run.json of a verification and of a promotion, written by the roles' own tasks."""
    folder = tmp_path_factory.mktemp("runs")
    rungs, method = measured
    answers = [{"output_ids": [5, 6], "meta_info": {"output_top_logprobs": None}}]
    gate = {"id": "fusion.jit", "feature": "allreduce_fusion", "layer": "jit", "path": "/x", "line": 7}
    comparison = json.loads(EVIDENCE.read_text())["decision"]["comparisons"][0]
    decision = {
        "verdict": "worse",
        "keep": False,
        "needs_attention": True,
        "reasons": ["slower"],
        "explained": [{"prompt": 2, "token": 7}],
    }
    probe = json.loads(PROBE.read_text())
    cases = [Case("eager", 4096, tokens, "bf16", "auto") for tokens in (1, 2)]
    found = [{"name": case.name, "ok": case.tokens == 1, "error": 0.003, "worst": 0.5} for case in cases]
    lost = Case("graph", 4096, 1, "bf16", "auto")
    cases.append(lost)
    found.append({"name": lost.name, "ok": False, "error": None, "worst": None})
    rungs[0]["notes"] = [LOW_POWER_NOTE]
    rungs[1] |= {"power_watts": 431.0, "tokens_per_joule": 1.234}
    code, output = play(
        folder,
        PLAY,
        folder=str(folder),
        root=str(ROOT),
        sm120_gates_facts={
            "packages": {"sglang": {"version": "0.5.9", "root": "/x", "source": "wheel"}},
            "gates": [{**gate, "state": "open", "why": "closed to SM120"}],
            "digest": "ab" * 32,
        },
        sglang_runtime_facts={"versions": {"torch": "2.11.0", "flashinfer-python": "0.6.12", "pip": "26.0"}},
        fusion_probe_facts={
            "verdict": "passed",
            "stages": probe["stages"],
            "loses_from_tokens": {},
            "cases": case_rows(cases, found),
            "speed": probe["speed"]["rows"][:2],
        },
        __sglang_verify_time="20260301T100000Z",
        __sglang_verify_results=[
            {
                "instance": "main",
                "status": "healthy",
                "version": "0.5.9",
                "model": "/m",
                "evidence": {},
                "rungs": rungs,
                "method": method,
                "notes": ["fusion sleeps"],
            }
        ],
        __sglang_promote_time="20260301T110000Z",
        __sglang_promote_method=method,
        __sglang_promote_outcome="and it does not answer",
        __sglang_promote_measured=[
            {"side": side, "answers": answers, "rungs": rungs} for side in ("off", "on", "on", "off")
        ],
        __sglang_promote_decision={
            **decision,
            "comparisons": [comparison],
            "changed": False,
            "failed": False,
        },
    )
    assert code == 0, output
    return {
        "verify": folder / "artifacts/verify/localhost/20260301T100000Z/run.json",
        "promote": folder / "artifacts/promote/localhost/20260301T110000Z/run.json",
        "summary": folder / "summary.txt",
    }


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("kind", ["verify", "promote"])
def test_what_the_roles_write_fits_the_schema(written: dict[str, Path], kind: str) -> None:
    run = json.loads(written[kind].read_text())
    jsonschema.validate(run, SCHEMA)
    assert run["kind"] == kind
    assert {stat.S_IMODE(path.stat().st_mode) for path in written[kind].parent.iterdir()} == {0o600}
    assert {path.name for path in written[kind].parent.iterdir()} == {"run.json", "report.html", "curves.png"}
    assert stat.S_IMODE(written[kind].parent.stat().st_mode) == 0o700


def test_the_summary_tells_notes_and_power(written: dict[str, Path]) -> None:
    lines = [line.strip() for line in written["summary"].read_text().splitlines()]
    assert "Note: fusion sleeps" in lines
    assert lines[lines.index(f"Note: {LOW_POWER_NOTE}") - 1].startswith("1 stream: ")
    assert any(line.endswith("failed, 431 W, 1.23 tok/J") for line in lines)


class Page(HTMLParser):
    """The rows of a page's tables as lists of cells, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self.in_cell = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, _attributes: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.rows[-1][-1] += data.strip()


@pytest.mark.parametrize("kind", ["verify", "promote"])
def test_a_page_tells_gates_probe_system_method_power_and_notes(written: dict[str, Path], kind: str) -> None:
    run = json.loads(written[kind].read_text())
    page = Page(written[kind].with_name("report.html"))
    assert ["jit", "fusion.jit", "allreduce_fusion", "open", "/x:7", "closed to SM120"] in page.rows
    assert ["eager", "4096", "bf16", "1 of 2", "3.00e-03", "50 %"] in page.rows
    assert ["graph", "4096", "bf16", "0 of 1", "not finite", "not finite"] in page.rows
    speed = run["probe"]["speed"][0]
    assert [str(speed["hidden"]), str(speed["tokens"]), str(speed["fused_microseconds"]),
            str(speed["unfused_microseconds"]), f"{speed['ratio']:.2f}"] in page.rows  # fmt: skip
    assert ["versions", "flashinfer-python 0.6.12, torch 2.11.0"] in page.rows
    assert run["system"]["kernel"] == platform.release()
    assert ["operating system", f"{run['system']['os']}, kernel {platform.release()}"] in page.rows
    assert f"seed: {SPEC.seed};" in page.text
    assert "formulas: sglang.bench_serving" in page.text
    powers = [(row[1], *row[-2:]) for row in page.rows if len(row) == 11]
    assert ("1", "no GPU", "no GPU") in powers
    assert ("2", "431", "1.234") in powers
    assert page.text.count(LOW_POWER_NOTE) == 1
    if kind == "verify":
        assert "main: fusion sleeps" in page.text
    else:
        assert run["decision"]["explained"] == [{"prompt": 2, "token": 7}]
        assert run["verdict"]["reasons"] == ["slower", "and it does not answer"]
        assert "and it does not answer" in page.text


def test_kept_evidence_fits_the_schema() -> None:
    jsonschema.validate(json.loads(EVIDENCE.read_text()), SCHEMA)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("verify", ("schema",), 2),
        ("verify", ("kind",), "other"),
        ("verify", ("time",), "yesterday"),
        ("verify", ("instances",), []),
        ("verify", ("verdict",), {"bad": False}),
        ("verify", ("instances", 0, "status"), "fine"),
        ("verify", ("instances", 0, "rungs", 0, "output_tokens_per_second"), "fast"),
        ("verify", ("instances", 0, "rungs", 0, "series"), []),
        ("verify", ("gates", 0, "state"), "ajar"),
        ("promote", ("sides",), {}),
        ("verify", ("system", "gpus"), [{"name": "H200"}]),
        ("verify", ("probe", "cases", 0, "right"), "all"),
        ("promote", ("decision", "explained"), [{"prompt": 0}]),
        ("promote", ("decision", "verdict"), "perhaps"),
        ("promote", ("sides", "on", "rungs", 0, "ttft_ms"), {"p50": 1.0}),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_wrong_run_is_refused_in_one_sentence(
    written: dict[str, Path], tmp_path: Path, kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    run = json.loads(written[kind].read_text())
    at = run
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(run, SCHEMA)
    wrong = tmp_path / "run.json"
    wrong.write_text(json.dumps(run))
    if path == ("gates", 0, "state"):  # the program itself once: it costs a second
        done = report(tmp_path, written["verify"], wrong)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert str(wrong) in done.stderr
        assert not (tmp_path / "page.html").exists()


def test_a_run_without_any_figure_has_a_page(written: dict[str, Path], tmp_path: Path) -> None:
    run = json.loads(written["verify"].read_text())
    for instance in run["instances"]:
        instance["rungs"] = []
    other = tmp_path / "other.json"
    other.write_text(json.dumps(run))
    done = report(tmp_path, other)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing was measured" in (tmp_path / "page.html").read_text()


def test_two_runs_are_compared_on_one_page(written: dict[str, Path], tmp_path: Path) -> None:
    run = copy.deepcopy(json.loads(written["verify"].read_text()))
    run["instances"][0]["rungs"][0] |= dict.fromkeys(
        ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    )  # nothing answered
    other = tmp_path / "other.json"
    other.write_text(json.dumps(run))
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "page.html").chmod(0o644)
    done = report(tmp_path, written["promote"], other)
    assert (done.returncode, done.stderr) == (0, "")
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600
    assert "worse" in (tmp_path / "page.html").read_text()


def test_thresholds_name_figures_that_a_rung_has(
    measured: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    rung = SCHEMA["$defs"]["rung"]["properties"]
    for figure in THRESHOLDS["options"]["figure"]["choices"]:
        value: Any = measured[0][0]
        for key in figure.split("."):
            assert key in value, figure
            value = value[key]
        assert figure.split(".")[0] in rung


@pytest.mark.parametrize(
    "threshold",
    [
        {"figure": "output_tokens_per_secnd", "minimum": 5},
        {"figure": "ttft_ms.p98", "maximum": 5},
        {"figure": "ttft_ms.p99", "maximun": 5},
        {"figure": "ttft_ms.p99"},
        {"minimum": 5},
        {"figure": "ttft_ms.p99", "maximum": "fast"},
    ],
)
def test_a_threshold_that_cannot_be_does_not_pass_the_spec(threshold: dict[str, Any]) -> None:
    validator = ArgumentSpecValidator({"sglang_verify_thresholds": THRESHOLDS})
    right = {"figure": "ttft_ms.p99", "maximum": 5, "concurrency": 8}
    assert validator.validate({"sglang_verify_thresholds": [right]}).error_messages == []
    assert validator.validate({"sglang_verify_thresholds": [right, threshold]}).error_messages != []


def test_wrong_thresholds_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    thresholds = [
        {"figure": "output_tokens_per_secnd", "minimum": 5},
        {"figure": "ttft_ms.p99", "maximum": 5, "concurrency": 7},
    ]
    code, output = play(tmp_path, PREFLIGHT, sglang_verify_thresholds=thresholds)
    assert code == 2, output
    assert "Nothing was changed" in output
    assert "output_tokens_per_secnd" in output
    assert "found: 7; do: add the rung" in output


def test_a_missed_threshold_is_one_whose_rung_was_not_measured_too(
    measured: tuple[list[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "roles/sglang_verify/filter_plugins"))
    from missed_thresholds import missed_thresholds

    results = [{"instance": "main", "rungs": measured[0]}]
    asked = [
        {"figure": "output_tokens_per_second", "minimum": 0.001},
        {"figure": "e2e_ms.p50", "maximum": 0},
        {"figure": "e2e_ms.p50", "maximum": 0, "concurrency": 2},
        {"figure": "power_watts", "maximum": 1000, "concurrency": 1},
        {"figure": "e2e_ms.p50", "maximum": 1e9, "concurrency": 64},
    ]
    missed = missed_thresholds(results, asked)
    assert [(one["figure"], one["concurrency"]) for one in missed] == [
        ("e2e_ms.p50", 1),
        ("e2e_ms.p50", 2),
        ("e2e_ms.p50", 2),
        ("power_watts", 1),
        ("e2e_ms.p50", 64),
    ]
    assert [one["found"] is None for one in missed] == [False, False, False, True, True]
