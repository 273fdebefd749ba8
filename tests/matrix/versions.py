"""The releases that the catalogue was read against, and the FlashInfer that each SGLang pins in its METADATA."""

from __future__ import annotations

PINS = {
    "0.5.8": "0.6.1",
    "0.5.8.post1": "0.6.1",
    "0.5.9": "0.6.3",
    "0.5.10": "0.6.7.post2",
    "0.5.10.post1": "0.6.7.post3",
    "0.5.11": "0.6.8.post1",
    "0.5.12": "0.6.11.post1",
    "0.5.12.post1": "0.6.11.post1",
    "0.5.13": "0.6.12",
    "0.5.13.post1": "0.6.12",
    "0.5.14": "0.6.12",
    "0.5.15": "0.6.12",
    "0.5.15.post1": "0.6.12",
    "0.5.16": "0.6.14",
    "0.5.17": "0.6.15.post1",
    "0.5.18": "0.6.17",
    "0.5.19": "0.6.18",
    "0.5.20": "0.6.18",
    "0.5.21": "0.6.18",
    "0.5.22": "0.7.1",
    "0.5.23": "0.7.2",
}
FLASHINFER = (
    *("0.6.0", "0.6.1", "0.6.2", "0.6.3", "0.6.4", "0.6.5", "0.6.6", "0.6.7", "0.6.7.post2", "0.6.7.post3"),
    *("0.6.8", "0.6.8.post1", "0.6.9", "0.6.10", "0.6.10.post1", "0.6.11", "0.6.11.post1", "0.6.11.post3"),
    *("0.6.12", "0.6.13", "0.6.14", "0.6.15", "0.6.15.post1", "0.6.16", "0.6.16.post4", "0.6.17", "0.6.18"),
    *("0.6.18.post1", "0.7.0", "0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.4"),
)
CLOSED = FLASHINFER[: FLASHINFER.index("0.6.17")]
NATIVE = FLASHINFER[FLASHINFER.index("0.6.17") :]

# FlashInfer on its own is opened under the oldest SGLang; two installations that no release pins come on top.
ALONE_UNDER = "0.5.8"
MIXED = (("0.5.9", "0.7.2"), ("0.5.23", "0.6.3"))
