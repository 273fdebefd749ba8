#!/usr/bin/env python3
"""Make one self-contained HTML page (and a PNG of the curves) of a run's JSON, or compare several runs.

    report.py RUN.json [RUN.json ...] --html PAGE.html [--png CURVES.png]

A run is what the roles sglang_verify and sglang_promote write; docs/run.schema.json describes it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import matplotlib
from matplotlib.figure import Figure

matplotlib.use("agg")
ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "tools" / "templates"
SCHEMA = ROOT / "docs" / "run.schema.json"
# One figure of a curve: the key path in a rung, and what stands at the axis.
PANELS = [
    ("output_tokens_per_second", "output tokens per second"),
    ("ttft_ms.p50", "TTFT p50, ms"),
    ("tpot_ms.p50", "TPOT p50, ms"),
    ("power_watts", "GPU power, W"),
]

Rung = dict[str, Any]


def figure_of(rung: Rung, path: str) -> float | None:
    value: Any = rung
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def curves(run: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Rung]]]:
    """The ladders of a run with a name for each: its instances, or the two sides of a promotion."""
    if run["kind"] == "promote":
        for side in ("off", "on"):
            yield f"{prefix}fusion {side}", run["sides"][side]["rungs"]
    else:
        for instance in run["instances"]:
            yield f"{prefix}{instance['instance']}", instance["rungs"]


def notes(runs: list[dict[str, Any]], ladders: list[tuple[str, list[Rung]]]) -> list[str]:
    """What to know when reading the figures, each once, with the first place where it holds."""
    found: dict[str, str] = {}
    for run in runs:
        for instance in run["instances"]:
            for note in instance.get("notes", []):
                found.setdefault(note, instance["instance"])
    for name, rungs in ladders:
        for rung in rungs:
            for note in rung["notes"]:
                found.setdefault(note, f"{name}, {rung['concurrency']} concurrent")
    return [f"{place}: {note}" for note, place in found.items()]


def points(rungs: list[Rung], path: str) -> tuple[list[int], list[float]]:
    """(concurrencies, medians over the rungs of each); what has no figure is left out."""
    found: dict[int, list[float]] = {}
    for rung in rungs:
        value = figure_of(rung, path)
        if value is not None:
            found.setdefault(rung["concurrency"], []).append(value)
    return sorted(found), [statistics.median(found[streams]) for streams in sorted(found)]


def draw(ladders: list[tuple[str, list[Rung]]]) -> Figure:
    panels = [(path, text) for path, text in PANELS if any(points(rungs, path)[0] for _, rungs in ladders)]
    figure = Figure(figsize=(4.3 * max(len(panels), 1), 3.3), layout="constrained")
    if not panels:
        figure.text(0.5, 0.5, "no figures: nothing was measured", ha="center")
        return figure
    for axis, (path, text) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        streams: set[int] = set()
        for name, rungs in ladders:
            concurrency, values = points(rungs, path)
            streams |= set(concurrency)
            axis.plot(concurrency, values, "o-", label=name)
        axis.set_xlabel("concurrent requests")
        axis.set_ylabel(text)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(streams), [str(one) for one in sorted(streams)])
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.spines[["top", "right"]].set_visible(False)
    if len(ladders) > 1:
        figure.axes[0].legend(frameon=False)
    return figure


def page(runs: list[dict[str, Any]]) -> tuple[str, Figure]:
    names = [""] if len(runs) == 1 else [f"{run['host']} {run['time']} " for run in runs]
    ladders = [ladder for run, name in zip(runs, names, strict=True) for ladder in curves(run, name)]
    figure = draw(ladders)
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    picture = svg.getvalue()
    html = environment.get_template("report.html.j2").render(
        runs=runs, ladders=ladders, notes=notes(runs, ladders), picture=picture[picture.index("<svg") :]
    )
    return html, figure


def read(path: Path, schema: dict[str, Any]) -> dict[str, Any]:
    """A run, or the end of the program with one sentence on what is wrong with it."""
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or error
        sys.exit(
            f"{path}: wanted the JSON of a run; found: {found}. Those that are there: ls artifacts/*/*/run.json"
        )
    checker = jsonschema.Draft202012Validator(schema)
    if wrong := jsonschema.exceptions.best_match(checker.iter_errors(run)):
        said = wrong.message if len(wrong.message) < 200 else f"{wrong.message[:200]}..."
        sys.exit(
            f"{path}: wanted a run as docs/run.schema.json describes it, found at {wrong.json_path}: {said}"
        )
    return run


def write_private(path: Path, content: bytes) -> None:
    """For the owner alone: a page tells of hosts and paths."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--html", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    schema = json.loads(SCHEMA.read_text())
    html, figure = page([read(path, schema) for path in given.runs])
    write_private(given.html, html.encode())
    if given.png:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=110, format="png")
        write_private(given.png, picture.getvalue())


if __name__ == "__main__":
    main()
