"""Checks of the request alone: nothing here needs the network."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from .pve_desired import description
from .pve_finding import Finding
from .pve_spec import VmSpec
from .pve_text import parse_property, pci_address

__all__ = ["address_space", "mmio_stride_mib", "static_address", "validate"]

_DNS_NAME = re.compile(r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+.-]*\Z")
_MAPPING = re.compile(r"[A-Za-z][A-Za-z0-9_-]+\Z")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:/-]*\Z")
_MAC = re.compile(r"[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}\Z")
_BRIDGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\Z")
_CPUSET = re.compile(r"\d+(-\d+)?([,;]\d+(-\d+)?)*\Z")
_CHECKSUM = re.compile(r"(md5|sha1|sha224|sha256|sha384|sha512):[0-9a-fA-F]{32,128}\Z")
# An image of content import with an extension that the API takes, or the disk of a VM or template.
_VOLID = re.compile(
    r"[A-Za-z][A-Za-z0-9._-]*:(import/[^/\s]+\.(qcow2|raw|vmdk)|(\d+/)?(vm|base)-\d+-[^\s,]+)\Z"
)

MAX_HOSTPCI = 16
# Physical address bits that a named CPU model shows to the guest (qemu-server 9: models derived from
# qemu64 and kvm64 make OVMF stop at 40).
NAMED_MODEL_BITS = 40


def validate(spec: VmSpec) -> list[Finding]:
    """Everything that is wrong with the request."""
    findings = list(_identity(spec))
    if spec.wants_vm:
        for check in (_machine, _gpus, _numa, _hugepages, _storage, _network, _address_space):
            findings.extend(check(spec))
    return findings


def _identity(spec: VmSpec) -> Iterator[Finding]:
    if not 100 <= spec.vmid <= 999_999_999:
        yield Finding("vmid", "a number from 100 to 999999999", str(spec.vmid), "choose a free VMID")
    if not _DNS_NAME.match(spec.name):
        yield Finding("name", "a DNS name", repr(spec.name), "use letters, digits and hyphens")
    if not _OWNER.match(spec.owner_id):
        yield Finding(
            "owner_id", "a word", repr(spec.owner_id), "name the inventory or team that owns the VM"
        )
    if len(description(spec)) > 8192:
        yield Finding(
            "description", "8192 characters with our line", str(len(description(spec))), "shorten it"
        )
    for tag in (spec.owner_tag, *spec.tags):
        if not _TAG.match(tag):
            yield Finding("tags", "letters, digits, _ + . -", repr(tag), "rename the tag")


def _machine(spec: VmSpec) -> Iterator[Finding]:
    if spec.cores < 1 or spec.sockets < 1:
        yield Finding(
            "cores", "at least one core and one socket", f"{spec.cores} x {spec.sockets}", "set cores"
        )
    if spec.memory_mib < 1024:
        yield Finding("memory_mib", "1024 MiB or more", str(spec.memory_mib), "set memory_mib")
    try:
        cpu = parse_property(spec.cpu, "cputype")
    except ValueError as problem:
        yield Finding("cpu", "a model and options", str(problem), "use host,phys-bits=host")
        return
    if cpu.get("cputype") != "host":
        yield Finding(
            "cpu",
            "the model host: a named model shows the guest 40 address bits, too few for large GPU BARs",
            repr(spec.cpu),
            "use host,phys-bits=host",
        )
    bits = cpu.get("phys-bits", "host")
    if bits != "host" and not (bits.isdigit() and 8 <= int(bits) <= 64):
        yield Finding("cpu", "phys-bits of host or 8 to 64", bits, "use host,phys-bits=host")


def _gpus(spec: VmSpec) -> Iterator[Finding]:
    if spec.gpu_bar_mib < 1:
        yield Finding(
            "gpu_bar_mib", "1 or more", str(spec.gpu_bar_mib), "see lspci -vv; 131168 is the default"
        )
    if len(spec.gpus) > MAX_HOSTPCI:
        yield Finding("gpus", f"at most {MAX_HOSTPCI} devices", str(len(spec.gpus)), "split them over VMs")
    names = [gpu.mapping for gpu in spec.gpus]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding(
            "gpus", "each mapping once", f"{name} {names.count(name)} times", "remove the repetition"
        )
    for gpu in spec.gpus:
        if not _MAPPING.match(gpu.mapping):
            yield Finding(
                "gpus", "the name of a resource mapping", repr(gpu.mapping), "use letters, digits, _ and -"
            )
        if gpu.path is not None:
            try:
                pci_address(gpu.path)
            except ValueError as problem:
                yield Finding(
                    "gpus", "a PCI address as 0000:41:00.0", str(problem), "see lspci -D on the node"
                )
    if spec.p2p_clique is not None:
        if not 0 <= spec.p2p_clique <= 15:
            yield Finding("p2p_clique", "0 to 15", str(spec.p2p_clique), "the field has 4 bits")
        if spec.gpu_function != "0":
            yield Finding(
                "p2p_clique",
                "mappings of one function (gpu_function: '0')",
                f"gpu_function: {spec.gpu_function}",
                "QEMU cannot address a device of several functions by the name that the option needs",
            )


def _numa(spec: VmSpec) -> Iterator[Finding]:
    if not spec.numa_nodes:
        return
    if not spec.numa:
        yield Finding("numa_nodes", "numa: true", "numa: false", "set numa: true")
    total = sum(node.memory_mib for node in spec.numa_nodes)
    if total != spec.memory_mib:
        yield Finding(
            "numa_nodes",
            f"memory of all nodes equal to {spec.memory_mib} MiB",
            f"{total} MiB",
            "correct the nodes",
        )
    for node in spec.numa_nodes:
        for text in (node.cpus, node.hostnodes):
            if text is not None and not _CPUSET.match(text):
                yield Finding("numa_nodes", "numbers and ranges as 0-31", repr(text), "correct the node")


def _hugepages(spec: VmSpec) -> Iterator[Finding]:
    if spec.affinity is not None and not _CPUSET.match(spec.affinity):
        yield Finding("affinity", "CPU numbers and ranges as 0-31,64-95", repr(spec.affinity), "correct it")
    if spec.hugepages is None:
        return
    nodes = spec.numa_nodes
    if not spec.numa or not nodes or any(not re.fullmatch(r"\d+", node.hostnodes or "") for node in nodes):
        yield Finding(
            "hugepages",
            "numa: true and numa_nodes with exactly one hostnode each",
            f"numa: {spec.numa}, {len(nodes)} nodes",
            "describe the nodes: Proxmox refuses huge pages without them when the VM starts",
        )
    if spec.hugepages == "any":
        return
    page = int(spec.hugepages)
    for node in nodes:
        if node.memory_mib % page:
            yield Finding(
                "hugepages", f"memory in multiples of {page} MiB", f"{node.memory_mib} MiB", "round it"
            )


def _storage(spec: VmSpec) -> Iterator[Finding]:
    if not spec.storage:
        yield Finding("storage", "the name of a storage", "nothing", "set storage, for example local-lvm")
    if spec.disk_gib < 1:
        yield Finding("disk_gib", "1 or more", str(spec.disk_gib), "set disk_gib")
    if spec.image_volid is not None and not _VOLID.match(spec.image_volid):
        yield Finding(
            "image_volid",
            "a volume as local:import/noble.qcow2 (no path; qcow2, raw or vmdk)",
            repr(spec.image_volid),
            "put the image on a storage with content type import, an .img of a cloud renamed to .qcow2",
        )
    if spec.image_url is not None and not re.match(r"https?://", spec.image_url):
        yield Finding("image_url", "an http or https address", repr(spec.image_url), "correct it")
    if spec.image_url is not None and not (spec.image_volid and ":import/" in spec.image_volid):
        yield Finding(
            "image_volid",
            "STORAGE:import/FILE to download to",
            repr(spec.image_volid),
            "name the file to make",
        )
    if spec.image_checksum is not None and not _CHECKSUM.match(spec.image_checksum):
        yield Finding("image_checksum", "sha256:HEX or sha512:HEX", repr(spec.image_checksum), "correct it")


def _network(spec: VmSpec) -> Iterator[Finding]:
    if spec.mac is not None and not _MAC.match(spec.mac):
        yield Finding("mac", "a unicast MAC as BC:24:11:00:00:01", repr(spec.mac), "correct it")
    if not _BRIDGE.match(spec.bridge):
        yield Finding("bridge", "the name of a bridge or vnet", repr(spec.bridge), "correct it")
    if not _USER.match(spec.ciuser):
        yield Finding("ciuser", "a user name of Linux", repr(spec.ciuser), "use letters, digits, _ and -")
    for server in spec.nameservers:
        try:
            ipaddress.ip_address(server)
        except ValueError:
            yield Finding("nameservers", "addresses", repr(server), "correct it")
    if spec.searchdomain is not None and not _DNS_NAME.match(spec.searchdomain):
        yield Finding("searchdomain", "a DNS name", repr(spec.searchdomain), "correct it")
    if spec.vlan is not None and not 1 <= spec.vlan <= 4094:
        yield Finding("vlan", "1 to 4094", str(spec.vlan), "correct it")
    if not spec.sshkeys and spec.image_volid is not None:
        yield Finding(
            "sshkeys",
            "at least one public key",
            "none",
            "give the text of a .pub file (ssh-keygen -t ed25519 makes one)",
        )
    for key in spec.sshkeys:
        if not re.match(r"(ssh|ecdsa|sk)-\S+ \S+|ecdsa-sha2-\S+ \S+|sk-\S+@openssh\.com \S+", key):
            yield Finding(
                "sshkeys", "public keys in OpenSSH's form", repr(key[:40]), "give the .pub file's text"
            )
    yield from _ipconfig(spec.ipconfig)


def _ipconfig(text: str) -> Iterator[Finding]:
    try:
        parts = parse_property(text)
        unknown = parts.keys() - {"ip", "gw", "ip6", "gw6"}
        if unknown or not parts.keys() & {"ip", "ip6"}:
            raise ValueError(text)
        _family(parts, "", ipaddress.IPv4Interface, {"dhcp"})
        _family(parts, "6", ipaddress.IPv6Interface, {"dhcp", "auto"})
    except ValueError as problem:
        yield Finding("ipconfig", "ip=dhcp or ip=ADDRESS/PREFIX,gw=ADDRESS", str(problem), "correct it")


def _family(
    parts: dict[str, str],
    suffix: str,
    kind: type[ipaddress.IPv4Interface | ipaddress.IPv6Interface],
    words: set[str],
) -> None:
    """Raise when address and gateway of one family are not what they must be."""
    text, gateway = parts.get(f"ip{suffix}"), parts.get(f"gw{suffix}")
    if text is None or text in words:
        if gateway is not None:
            raise ValueError(f"gw{suffix} without an address in ip{suffix}")
        return
    if "/" not in text:
        raise ValueError(f"{text} has no prefix length")
    address = kind(text)
    network = address.network
    if network.num_addresses > 2 and address.ip == network.network_address:
        raise ValueError(f"{text} is the address of the network")
    if gateway is not None and network.num_addresses > 1:  # an address alone has its gateway elsewhere
        there = type(address.ip)(gateway)
        if there not in network and not there.is_link_local:
            raise ValueError(f"gateway {gateway} is not in {network}")


def static_address(text: str) -> str | None:
    """The address that an ipconfig fixes, or None where the network decides."""
    parts = parse_property(text)
    for name in ("ip", "ip6"):
        value = parts.get(name, "dhcp")
        if value not in {"dhcp", "auto"}:
            return value.partition("/")[0]
    return None


def mmio_stride_mib(gpu_bar_mib: int) -> int:
    """Address space one GPU takes: its BARs, rounded up to a power of two, because windows are aligned.

    128 GiB + 64 MiB + 32 MiB of BARs behind one root port take 256 GiB.
    """
    return 1 << (gpu_bar_mib - 1).bit_length()


def guest_bits(spec: VmSpec) -> int | None:
    """Physical address bits the guest will see; None when only the node knows."""
    cpu = parse_property(spec.cpu, "cputype")
    limits = [bits for bits in (spec.host_phys_bits, spec.guest_phys_bits) if bits is not None]
    shown = cpu.get("phys-bits", "host" if cpu.get("cputype") == "host" else str(NAMED_MODEL_BITS))
    if shown.isdigit():
        limits.append(int(shown))
    if cpu.get("guest-phys-bits", "").isdigit():
        limits.append(int(cpu["guest-phys-bits"]))
    return min(limits) if limits else None


def address_space(spec: VmSpec) -> tuple[int, int | None, int | None]:
    """(MiB of MMIO the GPUs need, MiB of the firmware's 64-bit window, MiB of the whole address space).

    OVMF places the window in the upper eighth of the address space unless X-PciMmio64Mb says otherwise
    (edk2 2022.11 and later, tried with pci-testdev under QEMU).
    """
    needed = len(spec.gpus) * mmio_stride_mib(spec.gpu_bar_mib)
    bits = guest_bits(spec)
    space = None if bits is None else (1 << bits) >> 20
    window = spec.mmio64_mib if spec.mmio64_mib is not None else None if space is None else space // 8
    return needed, window, space


def _address_space(spec: VmSpec) -> Iterator[Finding]:
    if not spec.gpus:
        return
    try:
        needed, window, space = address_space(spec)
    except ValueError:
        return  # the cpu text is broken, which _machine reports
    count = len(spec.gpus)
    if window is not None and needed > window:
        bits = guest_bits(spec)
        yield Finding(
            "address space",
            f"a 64-bit MMIO window of {needed} MiB for {count} GPUs of {needed // count} MiB each",
            f"{window} MiB"
            + (f" ({bits} guest address bits)" if spec.mmio64_mib is None else " (mmio64_mib)"),
            "use cpu host,phys-bits=host on a host with more address bits, or raise mmio64_mib (root only)",
        )
    elif space is not None and window is not None and spec.memory_mib + window > space:
        yield Finding(
            "address space",
            f"room for {spec.memory_mib} MiB of memory and a window of {window} MiB",
            f"{space} MiB ({guest_bits(spec)} guest address bits)",
            "lower memory_mib or mmio64_mib",
        )
