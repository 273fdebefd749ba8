"""Whose driver a host has, whether it will do, what is to be done about it, and what is to be refused first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .apt_packages import Asked, Record, to_hold, wrong_packages
from .apt_state import held
from .gpu_findings import ERROR, OPEN_ONLY_FROM, Finding, driver_findings, finding

NONE, OURS, THEIRS = "none", "ours", "theirs"
RENAMED_FROM = 590  # NVIDIA's Ubuntu packages have no branch in their names from here on
TRUTH = {"Y": "1", "N": "0"}


@dataclass(frozen=True)
class Wanted:
    """What the role's variables ask for."""

    branch: str = "580"
    packages: tuple[str, ...] = ()
    headers: tuple[str, ...] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    power_limit_watts: int = 0
    adopt: bool = False
    digest: str = ""


def major(version: str | None) -> int:
    head = (version or "").partition(".")[0]
    return int(head) if head.isdigit() else 0


def default_packages(distribution: str, branch: str) -> tuple[str, ...]:
    """NVIDIA's compute-only set with open modules, with nvidia-smi and the persistence daemon.

    https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/ubuntu.html and .../debian.html
    """
    if distribution.startswith("debian"):
        return ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
    if distribution.startswith("ubuntu") and major(branch) >= RENAMED_FROM:
        return ("libnvidia-compute", "nvidia-dkms-open", "nvidia-persistenced")
    if distribution.startswith("ubuntu"):
        number = major(branch)
        names = ("libnvidia-compute-{}", "nvidia-dkms-{}-open", "nvidia-utils-{}", "nvidia-compute-utils-{}")
        return tuple(name.format(number) for name in names)
    return ()


def owner(facts: dict[str, Any]) -> str:
    """Ours when our record says so; theirs on any other sign of a driver."""
    record = facts["record"]
    if record is not None and record.requested:
        return OURS
    driver = facts["driver"]
    signs = (
        driver["module_version"],
        facts["disk"]["version"],
        facts["driver_packages"],
        driver["smi_exit"] != 127,
    )
    return THEIRS if any(signs) else NONE


def works(facts: dict[str, Any]) -> bool:
    """Whether nvidia-smi sees GPUs through modules that can run them."""
    driver = facts["driver"]
    newest = max((gpu["compute_capability"] or "" for gpu in facts["gpus"]), key=_capability, default="")
    impossible = driver["flavour"] == "proprietary" and _capability(newest) >= OPEN_ONLY_FROM
    return driver["smi_exit"] == 0 and bool(facts["gpus"]) and not impossible


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def their_problem(facts: dict[str, Any], wanted: Wanted) -> list[Finding]:
    """Why a driver that somebody else installed will not do."""
    names = facts["driver_packages"]
    purge = f"apt-get purge {' '.join(names)}" if names else "nvidia-uninstall (of NVIDIA's .run installer)"
    fix = f"take it away by its own means ({purge}), reboot, and run this again"
    version = facts["driver"]["module_version"] or facts["driver"]["library_version"]
    if works(facts):
        if 0 < major(version) < major(wanted.branch):
            found = f"{version}, installed by somebody else"
            older = f"set nvidia_driver_branch: '{major(version)}' to keep it, or {fix}"
            return [finding(ERROR, "driver", f"branch {wanted.branch} or newer", found, older)]
        if not wanted.adopt and wanted.power_limit_watts:
            what = "nvidia_driver_power_limit_watts is set, and the driver was installed by somebody else"
            return [
                finding(
                    ERROR, "driver", "settings for a driver of ours", what, "set nvidia_driver_adopt: true"
                )
            ]
        return []
    disk = facts["disk"]
    if "proprietary" in (facts["driver"]["flavour"], disk["flavour"]):
        return [
            finding(
                ERROR,
                "driver",
                "NVIDIA's open kernel modules, the only ones that run Blackwell",
                f"the proprietary ones {version or disk['version']} ({', '.join(names) or 'no packages'})",
                fix,
            )
        ]
    if facts["driver"]["smi_exit"] == 127:
        parts = ", ".join(names) or f"a module {disk['version'] or version}"
        return [finding(ERROR, "driver", "a whole driver, or none", f"no nvidia-smi, but {parts}", fix)]
    errors = [each for each in driver_errors(facts) if each["subject"] == "driver"]
    found = facts["driver"]["smi_error"] or "one that does not"
    return errors or [finding(ERROR, "driver", "a driver that works", found, fix)]


def driver_errors(facts: dict[str, Any]) -> list[Finding]:
    return [each for each in driver_findings(facts) if each["severity"] == ERROR]


def power_problem(facts: dict[str, Any], watts: int) -> list[Finding]:
    """A power limit that a card does not take."""
    found = []
    for gpu in facts["gpus"] if watts else []:
        low, high = gpu["power_limit_min_watts"], gpu["power_limit_max_watts"]
        if low is not None and high is not None and not low <= watts <= high:
            found.append(
                finding(
                    ERROR,
                    f"GPU {gpu['index']}",
                    f"nvidia_driver_power_limit_watts from {low:g} to {high:g}, the card's own range",
                    f"{watts}",
                    "set it within that range, or 0 for the card's default",
                )
            )
    return found


def refusals(
    facts: dict[str, Any], wanted: Wanted, whose: str, packages: list[str], missing: list[str]
) -> list[Finding]:
    """What has to be put right by the operator first, before anything is written."""
    if not facts["pci"] and not facts["gpus"]:
        return [each for each in driver_findings(facts) if each["subject"] == "pci"]
    if whose == THEIRS:
        found = their_problem(facts, wanted)
        if found or not wanted.adopt:
            return found
    found = power_problem(facts, wanted.power_limit_watts)
    if whose == NONE and not packages:
        found.append(
            finding(
                ERROR,
                "distribution",
                "Ubuntu 22.04 or 24.04, or Debian 12 or 13",
                facts["distribution"] or "no /etc/os-release",
                "set nvidia_driver_packages, nvidia_repository_url, nvidia_repository_key_url and _key_sha256",
            )
        )
    record = facts["record"] or Record()
    holds = [name for name in held(facts["packages"]) if name in missing and name not in record.held]
    if holds:
        found.append(
            finding(
                ERROR,
                "packages",
                "packages that may be installed",
                f"{', '.join(holds)} on hold",
                f"apt-mark unhold {' '.join(holds)}",
            )
        )
    if missing and facts["too_full"]:
        found.append(
            finding(ERROR, "disk", "room for the driver and its build", facts["too_full"], "make room there")
        )
    return found


def _same(live: str, wanted: Any) -> bool:
    text = {True: "1", False: "0"}.get(wanted, str(wanted)) if isinstance(wanted, bool) else str(wanted)
    return TRUTH.get(live, live) == TRUTH.get(text, text)


def reboot_reasons(facts: dict[str, Any], wanted: Wanted, disk: str | None) -> list[str]:
    """What only a reboot brings into effect."""
    driver = facts["driver"]
    reasons = [f"{name} is loaded and has the cards" for name in driver["nouveau_or_nova"]]
    if driver["module_version"] and disk and driver["module_version"] != disk:
        reasons.append(f"module {driver['module_version']} is loaded, {disk} is installed")
    for module, values in wanted.options.items():
        for name, value in values.items():
            live = facts["options"].get(module, {}).get(name)
            if live is not None and not _same(live, value):
                reasons.append(f"{module} runs with {name}={live}, set is {value}")
    words = str(wanted.options.get("nvidia", {}).get("NVreg_RegistryDwords", ""))
    if driver["module_version"] and words and words != driver["registry"]:
        reasons.append(f"nvidia runs with other registry words ({driver['registry'] or 'none'})")
    return reasons


def judge(facts: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """The plan: whose driver it is, refusals, what is missing, what is left to do."""
    whose = owner(facts)
    record, known = facts["record"] or Record(), facts["packages"]
    branch = wanted.branch
    headers = list(facts["headers"] if wanted.headers is None else wanted.headers)
    missing: list[str] = []
    if whose == THEIRS:
        branch = str(major(facts["driver"]["module_version"]) or branch)
        packages = list(facts["driver_packages"]) if wanted.adopt else []
    else:
        packages = list(wanted.packages or default_packages(facts["distribution"], branch))
        missing = wrong_packages(Asked(tuple(packages), Path(), branch), known, record)
        missing += [name for name in headers if not (name in known and known[name].there)]
    manage = whose != THEIRS or wanted.adopt
    holds = to_hold(Asked(tuple(packages), Path(), branch), known, record)
    unheld = [name for name in holds if known[name].want != "hold"]
    watts = wanted.power_limit_watts
    reboot = reboot_reasons(facts, wanted, facts["disk"]["version"]) if manage else []
    errors = driver_errors(facts)
    return {
        "owner": whose,
        "manage": manage,
        "problems": refusals(facts, wanted, whose, packages, missing),
        "branch": branch,
        "packages": packages + (headers if whose != THEIRS else []),
        "missing": missing,
        "packages_due": bool(missing or (manage and unheld)),
        "settings_due": any(
            not gpu["persistence"] or (watts and gpu["power_limit_watts"] not in (None, float(watts)))
            for gpu in facts["gpus"]
        ),
        "initramfs_due": facts["initramfs_done"] != wanted.digest,
        "loaded": facts["driver"]["module_version"] is not None,
        "reboot": reboot,
        "errors": errors,
        "effect_due": bool(missing or reboot or errors or facts["driver"]["module_version"] is None),
    }
