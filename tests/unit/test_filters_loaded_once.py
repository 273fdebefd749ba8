"""Filters are loaded once in a run, not in every task's process."""

from __future__ import annotations

from pathlib import Path

from local_play import play

FILTERS = """
import os

with open({seen!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")


class FilterModule:
    def filters(self):
        return {{"same": lambda value: value}}
"""
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "{{ 'a' | same }}"}
    - ansible.builtin.debug: {msg: "{{ 'b' | same }}"}
    - ansible.builtin.debug: {msg: "{{ 'c' | same }}"}
"""


def test_filters_are_loaded_once_in_a_run(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "filter_plugins").mkdir()
    (tmp_path / "filter_plugins/same.py").write_text(FILTERS.format(seen=str(seen)))
    code, output = play(tmp_path, PLAY)
    assert code == 0, output
    assert len(seen.read_text().splitlines()) == 1
