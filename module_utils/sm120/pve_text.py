"""Proxmox VE configuration values: one spelling for everything that means the same.

The API stores what it was given (``pcie=1``, ``pcie=on``, keys in any order, short PCI addresses,
url-encoded keys), so values are compared in a canonical form and written in ours.
Key names and defaults: https://pve.proxmox.com/pve-docs/qm.conf.5.html (PVE 9).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

__all__ = [
    "DEFAULTS",
    "canonical",
    "format_property",
    "is_true",
    "parse_property",
    "pci_address",
    "properties",
    "same",
]

_TRUE = frozenset({"1", "on", "yes", "true"})
_FALSE = frozenset({"0", "off", "no", "false"})

# The sub-key that may stand without its name in a property string.
_DEFAULT_KEY = {
    "agent": "enabled",
    "cpu": "cputype",
    "efidisk": "file",
    "hostpci": "host",
    "ide": "file",
    "machine": "type",
    "memory": "current",
    "sata": "file",
    "scsi": "file",
    "tpmstate": "file",
    "vga": "type",
    "virtio": "file",
}
_PROPERTY_FAMILIES = frozenset({*_DEFAULT_KEY, "boot", "ipconfig", "net", "numa_node", "startup"})
_BOOL_SUBKEYS = {
    "agent": {"enabled", "fstrim_cloned_disks", "freeze-fs-on-backup"},
    "cpu": {"hidden"},
    "efidisk": {"pre-enrolled-keys"},
    "hostpci": {"pcie", "rombar", "x-vga", "legacy-igd"},
    "net": {"firewall", "link_down"},
    **{bus: {"iothread", "ssd", "backup", "replicate", "ro"} for bus in ("ide", "sata", "scsi", "virtio")},
}
# What a sub-key that is not written means, so that writing it is no difference.
_SUBKEY_DEFAULTS = {
    "agent": {"enabled": "0", "fstrim_cloned_disks": "0", "freeze-fs-on-backup": "1", "type": "virtio"},
    "hostpci": {"pcie": "0", "rombar": "1", "x-vga": "0", "legacy-igd": "0"},
    "net": {"firewall": "0", "link_down": "0"},
    "scsi": {"iothread": "0", "ssd": "0", "backup": "1", "replicate": "1", "ro": "0", "discard": "ignore"},
}
_BOOL_KEYS = frozenset({"onboot", "protection", "numa", "ciupgrade", "keephugepages", "template"})
_INT_KEYS = frozenset({"balloon", "cores", "sockets", "vcpus"})
_NIC_MODELS = frozenset({"virtio", "e1000", "e1000e", "rtl8139", "vmxnet3"})

# What a key that is not in the configuration means.
DEFAULTS: Mapping[str, str] = {
    "agent": "0",
    "bios": "seabios",
    "ciupgrade": "1",
    "cores": "1",
    "description": "",
    "memory": "512",
    "numa": "0",
    "onboot": "0",
    "protection": "0",
    "sockets": "1",
    "tags": "",
}


def is_true(value: object) -> bool:
    """Whether a value of the API means yes; anything that is neither yes nor no is an error."""
    text = str(int(value) if isinstance(value, bool) else value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"not a yes or no: {value!r}")


def _family(key: str) -> str:
    """``hostpci3`` -> ``hostpci``; ``numa0`` -> ``numa_node`` because ``numa`` alone is a switch."""
    match = re.fullmatch(r"([a-z]+?)(\d+)", key)
    if match is None:
        return key
    return "numa_node" if match[1] == "numa" else match[1]


def parse_property(text: str, default_key: str | None = None) -> dict[str, str]:
    """``gpu0,pcie=1`` -> ``{default_key: gpu0, pcie: 1}``."""
    found: dict[str, str] = {}
    for part in text.split(","):
        part = part.strip()
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not equals:
            if default_key is None:
                raise ValueError(f"{part!r} in {text!r} has no name")
            name, value = default_key, part
        if name in found:
            raise ValueError(f"{name!r} appears twice in {text!r}")
        found[name] = value
    return found


def format_property(parts: Mapping[str, str], default_key: str | None = None) -> str:
    """The reverse of parse_property: the unnamed value first, the others in the order given."""
    first = [parts[default_key]] if default_key is not None and default_key in parts else []
    return ",".join(first + [f"{name}={value}" for name, value in parts.items() if name != default_key])


def pci_address(text: str) -> str:
    """One spelling of a PCI address: domain written, lower case; without a function it means all of them."""
    match = re.fullmatch(
        r"(?:([0-9a-fA-F]{4,}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text.strip()
    )
    if match is None:
        raise ValueError(f"not a PCI address: {text!r}")
    domain, bus, device, function = match.groups()
    address = f"{domain or '0000'}:{bus}:{device}".lower()
    return address if function is None else f"{address}.{function}"


def _parse(key: str, text: str) -> dict[str, str]:
    family = _family(key)
    if family != "net":
        return parse_property(text, _DEFAULT_KEY.get(family))
    parts = parse_property(text, "model")
    for model in _NIC_MODELS & parts.keys():
        parts["macaddr"] = parts.pop(model)
        parts["model"] = model
    if "macaddr" in parts:
        parts["macaddr"] = parts["macaddr"].upper()
    return parts


def properties(key: str, text: str) -> dict[str, str]:
    """The sub-keys of a property string in canonical spelling, defaults left out."""
    family = _family(key)
    parts = _parse(key, text)
    for name in _BOOL_SUBKEYS.get(family, set()) & parts.keys():
        parts[name] = "1" if is_true(parts[name]) else "0"
    if family == "hostpci" and "host" in parts:
        parts["host"] = ";".join(pci_address(part) for part in parts["host"].split(";"))
    if family == "cpu" and "flags" in parts:
        parts["flags"] = ";".join(sorted(parts["flags"].split(";")))
    if family == "numa_node" and "memory" in parts:
        parts["memory"] = str(int(parts["memory"]))
    for name, default in _SUBKEY_DEFAULTS.get(family, {}).items():
        if parts.get(name) == default:
            del parts[name]
    return parts


def _canonical_text(key: str, text: str) -> str:
    if key == "tags":
        return ";".join(sorted({tag for tag in re.split(r"[;, ]+", text.lower()) if tag}))
    if key == "sshkeys":
        # Stored url-encoded; the order of the keys means nothing. "+" occurs in keys and is not a space.
        return "\n".join(sorted({line.strip() for line in unquote(text).splitlines() if line.strip()}))
    if key == "description":
        return text.rstrip("\n")
    if key == "nameserver":
        return " ".join(re.split(r"[ ,;]+", text.strip()))
    if key in {"args", "searchdomain"}:
        return " ".join(text.split())
    return text.strip()


def canonical(key: str, value: object) -> str:
    """The one form in which two values of ``key`` may be compared."""
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if key in _BOOL_KEYS:
        return "1" if is_true(text) else "0"
    family = _family(key)
    if family in _PROPERTY_FAMILIES:
        parts = properties(key, text)
        return ",".join(f"{name}={parts[name]}" for name in sorted(parts))
    if key in _INT_KEYS:
        return str(int(text))
    return _canonical_text(key, text)


def same(key: str, wanted: object, found: object | None) -> bool:
    """Whether the value found already is the value wanted."""
    if found is None:
        if key not in DEFAULTS:
            return False
        found = DEFAULTS[key]
    if key == "machine" and str(wanted) == "q35" and re.match(r"(type=)?(pc-)?q35(-|,|$)", str(found)):
        return True  # a version or a viommu set by hand: still q35
    try:
        return canonical(key, wanted) == canonical(key, found)
    except ValueError:
        return str(wanted) == str(found)
