"""apt's answers as they were recorded, what is refused, and a dpkg of a few lines that installs, holds and purges."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import apt_packages as module
import pytest
from ansible.module_utils.sm120.apt_packages import (
    Asked,
    Failed,
    Record,
    Refused,
    Undone,
    install,
    remove,
    too_full,
)
from ansible.module_utils.sm120.apt_state import (
    Package,
    Simulation,
    of_branch,
    parse_packages,
    parse_simulation,
    refusal,
    to_purge,
)
from conftest import RunModule

UNMET = """Reading package lists...
Some packages could not be installed. This may mean that you have
requested an impossible situation or if you are using the unstable
distribution that some required packages have not yet been created
or been moved out of Incoming.
The following information may help to resolve the situation:

The following packages have unmet dependencies:
 nva : Depends: nvb (= 580.1-1) but 590.1-1 is to be installed
E: Unable to correct problems, you have held broken packages.
"""
PLANNED = """The following NEW packages will be installed:
  nva nvb
The following packages will be REMOVED:
  old
0 upgraded, 2 newly installed, 1 to remove and 0 not upgraded.
Remv old [1.0]
Inst nvb (580.1-1 NVIDIA:NVIDIA CUDA [amd64])
Inst nva [570.1-1] (580.1-1 NVIDIA:NVIDIA CUDA [amd64])
Conf nvb (580.1-1 NVIDIA:NVIDIA CUDA [amd64])
"""


def test_what_apt_would_do_is_read() -> None:
    planned = parse_simulation(0, PLANNED)
    assert planned.install == {"nvb": ("", "580.1-1"), "nva": ("570.1-1", "580.1-1")}
    assert (planned.remove, planned.error) == (("old",), "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (UNMET, "nva : Depends: nvb (= 580.1-1) but 590.1-1 is to be installed"),
        ("E: Unable to locate package nothere\n", "nothere"),
        (
            "E: Unable to satisfy dependencies. Conflicting assignments:\n   1. nva:amd64 is selected\n",
            "1. nva:amd64",
        ),
        ("", "100"),
    ],
)
def test_why_apt_cannot_is_read(text: str, named: str) -> None:
    assert named in parse_simulation(100, text).error


def test_packages_are_read_and_the_installed_architecture_counts() -> None:
    found = parse_packages(
        "a\t1\thold\tinstalled\na\t\tunknown\tnot-installed\nb\t\tdeinstall\tconfig-files\n"
    )
    assert (found["a"], found["a"].there) == (Package("1", "hold", "installed"), True)
    assert found["b"].there is False


@pytest.mark.parametrize(
    ("version", "branch", "same"),
    [
        ("580.159.04-1", "580", True),
        ("580.159.04-0ubuntu1", "580.159.04", True),
        ("3:580.1", "580", True),
        ("5801.1", "580", False),
        ("580.159.041-1", "580.159.04", False),
        ("590.48.01-1", "580", False),
    ],
)
def test_versions_of_a_branch(version: str, branch: str, same: bool) -> None:
    assert of_branch(version, branch) is same


HELD = {"dkms": Package("2.8-1", "hold", "installed"), "x": Package("1", "install", "installed")}


def test_refusals() -> None:
    changes_held = Simulation({"dkms": ("2.8-1", "3.1")}, (), "")
    assert "apt-mark unhold dkms" in refusal(changes_held, HELD, (), ())
    assert refusal(changes_held, HELD, (), ("dkms",)) == ""
    assert "dkms" in refusal(Simulation({}, (), "a : Depends: dkms (>= 3)"), HELD, (), ())
    assert "remove x" in refusal(Simulation({}, ("x",), ""), HELD, (), ())
    assert refusal(Simulation({}, ("x",), ""), HELD, ("x",), ()) == ""


@dataclass
class Apt:
    """dpkg and apt over packages whose only relation is Depends: enough to install, fail, hold and purge."""

    offered: dict[str, tuple[str, tuple[str, ...]]]
    state: dict[str, Package] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    unneeded: set[str] = field(default_factory=set)  # what goes with --auto-remove
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: list[str]) -> tuple[int, str]:
        self.calls.append(argv)
        if argv[0] == "dpkg-query":
            rows = [f"{n}\t{p.version}\t{p.want}\t{p.status}" for n, p in sorted(self.state.items())]
            return 0, "\n".join(rows)
        if argv[0] == "apt-mark":
            want = {"hold": "hold", "unhold": "install"}[argv[1]]
            for name in argv[2:]:
                self.state[name] = Package(self.state[name].version, want, self.state[name].status)
            return 0, ""
        action = next((word for word in ("install", "purge", "update") if word in argv), "")
        names = [
            name for name in argv[argv.index(action) + 1 :] if not name.startswith("-") and "::" not in name
        ]
        simulated = "-s" in argv
        if action == "install":
            return self.install(names, simulated)
        if action == "purge":
            if "--allow-change-held-packages" not in argv and any(
                self.state[each].want == "hold" for each in names
            ):
                return (
                    100,
                    "E: Held packages were changed and -y was used without --allow-change-held-packages.",
                )
            return self.purge([*names, *(self.unneeded if "--auto-remove" in argv else ())], simulated)
        return 0, ""

    def needed(self, name: str) -> list[str]:
        return [*(each for need in self.offered[name][1] for each in self.needed(need)), name]

    def install(self, names: list[str], simulated: bool) -> tuple[int, str]:
        unknown = [name for name in names if name not in self.offered]
        if unknown:
            return 100, f"E: Unable to locate package {unknown[0]}\n"
        new = [each for name in names for each in self.needed(name) if each not in self.state]
        if simulated:
            return 0, "".join(
                f"Inst {name} ({self.offered[name][0]} x [amd64])\n" for name in dict.fromkeys(new)
            )
        for name in new:
            bad = name in self.failing
            self.state[name] = Package(
                self.offered[name][0], "install", "half-configured" if bad else "installed"
            )
            if bad:
                return 100, f"E: Sub-process /usr/bin/dpkg returned an error code (1): {name}\n"
        return 0, ""

    def purge(self, names: list[str], simulated: bool) -> tuple[int, str]:
        going = set(names)
        while True:
            more = {n for n in self.state if n in self.offered and going & set(self.offered[n][1])} - going
            if not more:
                break
            going |= more
        if not simulated:
            for name in going:
                self.state.pop(name, None)
        return 0, "".join(f"Purg {name} [1]\n" for name in sorted(going))


@pytest.fixture
def apt() -> Apt:
    offered: dict[str, tuple[str, tuple[str, ...]]] = {
        "driver": ("580.1-1", ("library",)),
        "library": ("580.1-1", ()),
        "modules": ("580.1-1", ("dkms", "library")),
        "dkms": ("3.2-1", ()),
        "zfs-dkms": ("2", ("dkms",)),
    }
    return Apt(offered, {"base": Package("1", "install", "installed")})


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Asked]:
    def make(*names: str, **given: object) -> Asked:
        kept = tmp_path / "sglang-sm120" / "packages.json"
        return Asked(names, kept, **{"branch": "580", **given})  # type: ignore[arg-type]

    return make


def test_installed_held_and_taken_away(apt: Apt, asked: Callable[..., Asked]) -> None:
    before = dict(apt.state)
    ask = asked("driver", "modules")
    done = install(apt, ask)
    assert set(done.installed) == {"driver", "library", "modules", "dkms"}
    assert set(done.held) == {"driver", "library", "modules"}  # dkms is of no branch
    record = json.loads(ask.record.read_text())
    assert set(record["requested"]) == {"driver", "modules"}
    assert install(apt, ask).changed is False
    assert remove(apt, ask).changed is True
    assert apt.state == before
    assert not ask.record.exists()
    assert remove(apt, ask).changed is False


@pytest.mark.parametrize("broken", ["dpkg-query", "apt-mark"])
def test_a_tool_that_fails_does_not_pass_for_nothing_to_do(
    apt: Apt, asked: Callable[..., Asked], broken: str
) -> None:
    def run(argv: list[str]) -> tuple[int, str]:
        return (2, "database is locked") if argv[0] == broken else apt(argv)

    # Asked before the installation, and after it: what could not be held is installed, and recorded.
    with pytest.raises(OSError if broken == "dpkg-query" else Failed, match="database is locked"):
        install(run, asked("driver"))
    assert asked("driver").record.exists() is (broken == "apt-mark")
    install(apt, asked("driver"))
    with pytest.raises(OSError, match="database is locked"):
        remove(run, asked("driver"))
    assert asked("driver").record.exists()
    assert "driver" in apt.state


def test_check_mode_asks_and_changes_nothing(apt: Apt, asked: Callable[..., Asked]) -> None:
    before = dict(apt.state)
    ask = asked("driver", check=True)
    assert set(install(apt, ask).installed) == {"driver", "library"}
    assert (apt.state, ask.record.exists()) == (before, False)
    assert not [call for call in apt.calls if call[0] == "apt-mark" or "update" in call]


def test_a_failed_installation_is_purged(apt: Apt, asked: Callable[..., Asked]) -> None:
    before = dict(apt.state)
    apt.failing = {"modules"}
    ask = asked("driver", "modules")
    with pytest.raises(Undone, match="modules"):
        install(apt, ask)
    assert apt.state == before
    assert not ask.record.exists()


def no_purge(apt: Apt) -> Callable[[list[str]], tuple[int, str]]:
    """An apt whose purge fails when it is not a simulation."""
    return lambda argv: (
        (100, "E: dpkg was interrupted\n") if "purge" in argv and "-s" not in argv else apt(argv)
    )


def test_a_failed_installation_that_cannot_be_purged_does_not_pass_for_taken_back(
    apt: Apt, asked: Callable[..., Asked]
) -> None:
    apt.failing = {"modules"}
    ask = asked("driver", "modules")
    with pytest.raises(Failed, match=r"modules.*taking .*library.* back failed: E: dpkg was interrupted"):
        install(no_purge(apt), ask)
    assert "library" in apt.state
    assert "library" in json.loads(ask.record.read_text())["installed"]


def test_a_removal_that_fails_holds_again_what_is_left(
    apt: Apt, asked: Callable[..., Asked], run_module: RunModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = asked("driver")
    install(apt, ask)
    before = dict(apt.state)
    with pytest.raises(Failed, match="interrupted"):
        remove(no_purge(apt), ask)
    assert (apt.state, apt.state["driver"].want) == (before, "hold")
    monkeypatch.setattr(module, "run_apt", no_purge(apt))
    code, told = run_module(module.main, record=str(ask.record), state="absent")
    assert (code, told["undone"], told["left"]) == (1, False, True)
    assert "taken back" not in told["msg"]
    assert str(ask.record) in told["msg"]
    assert remove(apt, ask).changed is True


def test_what_was_installed_and_could_not_be_looked_at_or_held_is_told_as_left(
    apt: Apt, asked: Callable[..., Asked], run_module: RunModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = asked("driver")
    given = {"name": ["driver"], "branch": "580", "record": str(ask.record)}
    broken = "dpkg-query"

    def run(argv: list[str]) -> tuple[int, str]:
        locked = argv[0] == broken and "driver" in apt.state
        return (2, "E: dpkg database is locked") if locked else apt(argv)

    monkeypatch.setattr(module, "run_apt", run)
    code, told = run_module(module.main, **given)
    assert (code, told["undone"], told["left"]) == (1, False, True)
    assert "database is locked" in told["problem"]
    # The next run installs nothing; what it finds locked is recorded all the same.
    for broken in ("dpkg-query", "apt-mark"):
        code, told = run_module(module.main, **given)
        assert (code, told["undone"], told["left"]) == (1, False, True), broken
    broken = ""
    assert run_module(module.main, **given)[1]["held"] == ["driver", "library"]


def test_a_tool_that_fails_before_anything_is_installed_leaves_nothing(
    asked: Callable[..., Asked], run_module: RunModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = asked().record
    monkeypatch.setattr(module, "run_apt", lambda _: (2, "E: dpkg database is locked"))
    code, told = run_module(module.main, name=["driver"], record=str(record))
    assert (code, told["undone"], told["left"]) == (1, False, False)
    record.parent.mkdir(parents=True)
    record.write_text("{")
    assert run_module(module.main, name=["driver"], record=str(record))[1]["left"] is True


@pytest.mark.parametrize(("names", "why"), [(("nothere",), "nothere"), (("driver",), "MiB free")])
def test_refused_before_anything_is_installed(
    apt: Apt, asked: Callable[..., Asked], tmp_path: Path, names: tuple[str, ...], why: str
) -> None:
    before = dict(apt.state)
    full = {str(tmp_path / "not" / "there"): 2**40} if why == "MiB free" else {}
    ask = asked(*names, free_mib=full)
    with pytest.raises(Refused, match=why):
        install(apt, ask)
    assert (apt.state, ask.record.exists()) == (before, False)


def test_what_something_else_needs_by_now_stays(apt: Apt, asked: Callable[..., Asked]) -> None:
    ask = asked("driver", "modules")
    install(apt, ask)
    apt.install(["zfs-dkms"], False)
    ours = ["driver", "library", "modules", "dkms"]
    gone, why = to_purge(apt, ours, ["driver", "modules"], ours, apt.state)
    assert (set(gone), why) == ({"driver", "modules"}, "")


def test_what_came_with_a_later_release_goes_too(apt: Apt, asked: Callable[..., Asked]) -> None:
    """Upgraded by hand within the branch: Ubuntu's firmware is then another package. dkms was there before."""
    old, new = "580.1-1", "580.2-1"
    apt.offered = {
        "driver": (old, ("firmware-580.1", "dkms")),
        "firmware-580.1": (old, ()),
        "dkms": ("3", ()),
    }
    apt.install(["dkms"], False)
    before = dict(apt.state)
    ask = asked("driver")
    install(apt, ask)
    apt(["apt-mark", "unhold", "driver", "firmware-580.1"])
    apt.offered |= {
        "driver": (new, ("firmware-580.2", "dkms")),
        "firmware-580.2": (new, ()),
        "tool": (new, ()),
    }
    del apt.state["driver"]
    apt.install(["driver", "tool"], False)
    before["tool"] = apt.state["tool"]
    apt.unneeded = {"firmware-580.2", "dkms"}
    remove(apt, ask)
    assert apt.state == before


def test_packages_that_were_there_are_held_but_never_removed(apt: Apt, asked: Callable[..., Asked]) -> None:
    apt.install(["driver"], False)
    before = dict(apt.state)
    ask = asked("driver")
    assert install(apt, ask).held == ("driver",)
    assert apt.state["driver"].want == "hold"
    remove(apt, ask)
    assert apt.state == before


def test_a_hold_of_the_operator_is_not_released(apt: Apt, asked: Callable[..., Asked]) -> None:
    ask = asked("driver")
    apt.install(["driver"], False)
    apt(["apt-mark", "hold", "driver"])
    assert install(apt, ask).changed is False
    remove(apt, ask)
    assert apt.state["driver"].want == "hold"


def test_room_is_added_up_by_file_system(tmp_path: Path) -> None:
    assert too_full({str(tmp_path): 1}) == ""
    told = too_full({str(tmp_path / "a"): 2**30, str(tmp_path / "b"): 2**30})
    assert str(2**31) in told


def test_a_record_survives_a_round_trip(tmp_path: Path) -> None:
    record = Record(("a",), ("a", "b"), ("b",))
    path = tmp_path / "sglang-sm120" / "r.json"
    record.save(path)
    assert (Record.load(path), oct(path.stat().st_mode & 0o777)) == (record, "0o600")


def test_what_the_operator_holds_by_now_stays(apt: Apt, asked: Callable[..., Asked]) -> None:
    ask = asked("driver", "modules")
    install(apt, ask)
    apt(["apt-mark", "hold", "dkms"])
    remove(apt, ask)
    assert set(apt.state) == {"base", "dkms"}
