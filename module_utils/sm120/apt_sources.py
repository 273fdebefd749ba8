"""The package sources that a host has, from its files: apt itself tells only of those it has fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    file: str
    uri: str
    suite: str
    components: tuple[str, ...]


def parse_list(text: str, file: str) -> list[Source]:
    """One-line style: `deb [options] uri suite component ...`."""
    found = []
    for line in text.splitlines():
        words = re.sub(r"\[[^\]]*\]", "", line.partition("#")[0]).split()
        if len(words) >= 3 and words[0] == "deb":
            found.append(Source(file, words[1].rstrip("/"), words[2], tuple(words[3:])))
    return found


def parse_deb822(text: str, file: str) -> list[Source]:
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        joined = re.sub(r"\n[ \t]+", " ", "\n".join(lines))
        values = {
            name.strip().lower(): value.split()
            for name, colon, value in (line.partition(":") for line in joined.splitlines())
            if colon
        }
        if "deb" not in values.get("types", []) or values.get("enabled", ["yes"]) == ["no"]:
            continue
        for uri in values.get("uris", []):
            for suite in values.get("suites", []):
                found.append(Source(file, uri.rstrip("/"), suite, tuple(values.get("components", []))))
    return found


def sources(root: Path) -> list[Source]:
    """All that are switched on, of the host below a folder."""
    found: list[Source] = []
    apt = root / "etc/apt"
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        parse = {".list": parse_list, ".sources": parse_deb822}.get(path.suffix)
        if parse and path.is_file():
            found += parse(path.read_text(encoding="utf-8", errors="replace"), f"/{path.relative_to(root)}")
    return found
