"""A check's answer: what was wanted, what was found, what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

__all__ = ["Finding", "errors", "render"]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be (error) or not as it should be (warning)."""

    subject: str
    wanted: str
    found: str
    fix: str
    severity: str = "error"
    reboot: bool = False  # whether a reboot would mend it

    def as_dict(self) -> dict[str, str | bool]:
        """The form in which modules return it."""
        return asdict(self)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that forbid to go on."""
    return [finding for finding in findings if finding.severity == "error"]


def render(findings: Iterable[Finding]) -> str:
    """Text for an operator: one paragraph for each finding."""
    return "\n".join(
        f"{item.subject}: wanted {item.wanted}; found {item.found}. Fix: {item.fix}" for item in findings
    )
