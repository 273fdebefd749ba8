#!/usr/bin/env python3
"""Write docs/profiles.md from the role sglang_server's profiles and refused combinations, and the release sets.

--check changes nothing and exits 1 when the page is not what this script would write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/profiles.md"
SERVER = ROOT / "roles/sglang_server/vars"
LOCKS = ROOT / "roles/sglang_runtime/files/locks"
MARK = "<!-- tools/profiles_doc.py writes what follows to the next mark -->"
END = "<!-- end -->"
# Arguments that tell profiles apart; the others stand in vars/profiles.yml with their sources.
SHOWN = {
    "tensor-parallel-size": "TP",
    "pipeline-parallel-size": "PP",
    "quantization": "weights",
    "kv-cache-dtype": "KV cache",
    "attention-backend": "attention",
    "moe-runner-backend": "MoE",
    "max-running-requests": "requests",
    "mem-fraction-static": "memory",
    "speculative-algorithm": "draft",
}
PACKAGES = ("flashinfer-python", "flashinfer-cubin", "transformers")
KERNELS = ("sgl-kernel", "sglang-kernel")  # the name changed with 0.5.10


def load(path: Path, name: str) -> Any:
    return yaml.safe_load(path.read_text())[name]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def profiles() -> str:
    known = load(SERVER / "profiles.yml", "__sglang_server_profiles")
    rows = []
    for name, own in known.items():
        like = known.get(own.get("like", ""), {"arguments": {}})
        arguments = {**like["arguments"], **own["arguments"]}
        rows.append([f"`{name}`", *(str(arguments.get(each, "")) for each in SHOWN)])
    return table(["profile", *SHOWN.values()], rows)


def met_by(rule: dict[str, Any]) -> str:
    """What a rule is met by, in a few words."""
    said = []
    if "profile" in rule:
        said.append(f"profile `{rule['profile'].lstrip('^')}…`")
    for name, values in rule.get("arguments", {}).items():
        said.append(f"`{name}` given" if values == "any" else f"`{name}` {', '.join(values)}")
    said += [f"no `{name}`" for name in rule.get("arguments_lacking", [])]
    said += [f"`{name}` matching `{pattern}`" for name, pattern in rule.get("environment", {}).items()]
    said += [f"no `{name}`" for name in rule.get("environment_lacking", {})]
    for key, words in (("gpus_from", "{} cards or more"), ("gpus_below", "fewer than {} cards")):
        if key in rule:
            said.append(words.format(rule[key]))
    if "stages_from" in rule:
        said.append(f"{rule['stages_from']} pipeline stages or more")
    if "fusion" in rule:
        said.append(f"fusion {' or '.join(rule['fusion'])}")
    if "below" in rule:
        said.append(f"SGLang before {rule['below']}")
    return "; ".join(said)


def refused() -> str:
    rows = [
        [f"`{rule['id']}`", met_by(rule), rule["reason"], rule["instead"], link(rule["source"])]
        for rule in load(SERVER / "refused.yml", "__sglang_server_refused")
    ]
    return table(["id", "met by", "why", "instead", "source"], rows)


def link(source: str) -> str:
    return f"[{source.rpartition('/')[2]}]({source})" if source.startswith("https://") else source


def sets() -> str:
    known = load(ROOT / "roles/sglang_runtime/vars/main.yml", "__sglang_runtime_releases")
    rows = []
    for release, each in known.items():
        lines = [line for line in (LOCKS / f"{release}-cuda.txt").read_text().splitlines() if "==" in line]
        locked = dict(line.split("==") for line in lines)
        kernels = next(f"{name} {locked[name]}" for name in KERNELS if name in locked)
        others = [locked.get(name, "none") for name in PACKAGES]
        free = f"{each['cuda']['free_mib']} MiB"
        rows.append([release, locked["torch"], kernels, *others, str(len(locked)), free])
    return table(["SGLang", "torch", "kernels", *PACKAGES, "packages", "free disk"], rows)


def page() -> str:
    text = PAGE.read_text()
    parts = text.split(MARK)
    written = [parts[0]]
    for make, part in zip((sets, profiles, refused), parts[1:], strict=True):
        written.append(f"\n\n{make()}\n\n{END}{part.partition(END)[2]}")
    return MARK.join(written)


def main() -> None:
    wanted = page()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() != wanted:
            sys.exit(f"wanted: {PAGE.relative_to(ROOT)} as its sources make it. Run: tools/profiles_doc.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
