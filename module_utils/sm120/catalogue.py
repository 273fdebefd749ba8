"""The whole catalogue: which text a gate has in a version, in the order in which edits are made."""

from __future__ import annotations

import hashlib

from . import catalogue_flashinfer, catalogue_sglang
from .gate_model import LAYERS, EditRecord, Gate, Variant
from .versions import Ranges

GATES: tuple[Gate, ...] = tuple(
    sorted((*catalogue_flashinfer.GATES, *catalogue_sglang.GATES), key=lambda gate: LAYERS.index(gate.layer))
)
FEATURES: tuple[str, ...] = tuple(sorted({gate.feature for gate in GATES if gate.feature}))

# The releases whose wheels were read; a newer one is accepted for as long as every text is where it was.
NEWEST_READ = {"sglang": "0.5.23", "flashinfer": "0.7.4"}


def variant_for(gate: Gate, version: str, ranges: Ranges) -> Variant | None:
    """The text that a gate has in a version of its package, or None where the catalogue does not know."""
    for variant in gate.variants:
        if ranges.contains(variant.versions, version):
            return variant
    return None


def records(gate: Gate, variant: Variant) -> list[EditRecord]:
    return [edit.record(gate.id) for edit in variant.edits]


def digest() -> str:
    """Identifies this state of the catalogue in a manifest."""
    return hashlib.sha256(repr(GATES).encode()).hexdigest()
