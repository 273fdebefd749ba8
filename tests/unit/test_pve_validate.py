"""Checks of the request that need no network."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.sm120.pve_spec import ARGUMENTS, VmSpec
from ansible.module_utils.sm120.pve_validate import address_space, mmio_stride_mib, static_address, validate
from hypothesis import given, settings
from hypothesis import strategies as st
from pve_kit import ARGUMENTS as WANTED


def spec(**changes: Any) -> VmSpec:
    """The 8-GPU VM with changes."""
    params = {name: argument.get("default") for name, argument in ARGUMENTS.items()} | WANTED | changes
    return VmSpec.from_params(params)


def subjects(**changes: Any) -> list[str]:
    return [finding.subject for finding in validate(spec(**changes))]


def test_the_8_gpu_vm_is_right() -> None:
    assert subjects() == []


NODE = {"cpus": "0-31", "memory_mib": 262144, "hostnodes": "0", "policy": "bind"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"vmid": 99}, ["vmid"]),
        ({"name": "llm_1"}, ["name"]),
        ({"name": "-llm"}, ["name"]),
        ({"owner_id": "two words"}, ["owner_id"]),
        ({"tags": ["a b"]}, ["tags"]),
        ({"cores": None}, ["cores"]),
        ({"memory_mib": None}, ["memory_mib"]),
        ({"cpu": "EPYC-Genoa,phys-bits=host"}, ["cpu"]),
        ({"cpu": "host,phys-bits=many"}, ["cpu"]),
        ({"gpus": [{"mapping": "gpu0"}] * 2}, ["gpus"]),
        ({"gpus": [{"mapping": f"gpu{index}"} for index in range(17)]}, ["gpus"]),
        ({"gpus": [{"mapping": "gpu0", "path": "nowhere"}]}, ["gpus"]),
        ({"gpus": [{"mapping": "0"}]}, ["gpus"]),
        ({"numa": True, "numa_nodes": [NODE]}, ["numa_nodes"]),
        ({"numa": False, "numa_nodes": [NODE, NODE]}, ["numa_nodes"]),
        ({"hugepages": "1024"}, ["hugepages"]),
        (
            {"hugepages": "any", "numa": True, "numa_nodes": [{**NODE, "hostnodes": "0-1"}, NODE]},
            ["hugepages"],
        ),
        ({"p2p_clique": 16}, ["p2p_clique"]),
        ({"p2p_clique": 0, "gpu_function": "all"}, ["p2p_clique"]),
        ({"affinity": "all"}, ["affinity"]),
        ({"storage": None}, ["storage"]),
        ({"disk_gib": 0}, ["disk_gib"]),
        ({"image_volid": "/root/noble.qcow2"}, ["image_volid"]),
        ({"image_volid": "local:import/noble.img"}, ["image_volid"]),
        ({"image_volid": "local:iso/noble.qcow2"}, ["image_volid"]),
        ({"image_volid": "local-lvm:vm-9000-disk-0"}, []),
        ({"image_volid": "local:9000/base-9000-disk-0.qcow2"}, []),
        ({"image_url": "ftp://example.com/x"}, ["image_url"]),
        ({"image_checksum": "abc"}, ["image_checksum"]),
        ({"mac": "BD:24:11:00:00:01"}, ["mac"]),  # a group address
        ({"vlan": 4095}, ["vlan"]),
        ({"sshkeys": []}, ["sshkeys"]),
        ({"sshkeys": ["~/.ssh/id.pub"]}, ["sshkeys"]),
        ({"ipconfig": "ip=192.0.2.1"}, ["ipconfig"]),
        ({"ipconfig": "gw=192.0.2.1"}, ["ipconfig"]),
        ({"ipconfig": "ip=dhcp,mtu=9000"}, ["ipconfig"]),
        ({"ipconfig": "ip=2001:db8::10/64"}, ["ipconfig"]),
        ({"ipconfig": "ip6=192.0.2.10/24"}, ["ipconfig"]),
        ({"ipconfig": "ip=192.0.2.0/24"}, ["ipconfig"]),
        ({"ipconfig": "ip=192.0.2.10/24,gw=192.0.3.1"}, ["ipconfig"]),
        ({"ipconfig": "ip=dhcp,gw=192.0.2.1"}, ["ipconfig"]),
        ({"ipconfig": "ip=192.0.2.10/31,gw=192.0.2.11"}, []),
        ({"ipconfig": "ip=192.0.2.10/32,gw=198.51.100.1"}, []),
        ({"ipconfig": "ip6=2001:db8::10/64,gw6=fe80::1"}, []),
        ({"ciuser": "root;x y"}, ["ciuser"]),
        ({"bridge": "vm br,firewall=1"}, ["bridge"]),
        ({"nameservers": ["192.0.2.53", "dns"]}, ["nameservers"]),
        ({"searchdomain": "a b"}, ["searchdomain"]),
        ({"description": "x" * 8192}, ["description"]),
        ({"gpu_bar_mib": 0}, ["gpu_bar_mib"]),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], found: list[str]) -> None:
    assert subjects(**changes) == found


def test_huge_pages_with_one_host_node_each() -> None:
    nodes = [NODE, {**NODE, "cpus": "32-63", "hostnodes": "1"}]
    assert subjects(hugepages="1024", numa=True, numa_nodes=nodes) == []


def test_absent_needs_no_description_of_the_vm() -> None:
    assert subjects(state="absent", cores=None, memory_mib=None, storage=None, sshkeys=[], gpus=[]) == []


def test_empty_text_is_the_same_as_none() -> None:
    assert subjects(mac="", image_url="", hugepages="", affinity="", searchdomain="", efi_storage="") == []
    assert spec(efi_storage="").efi_storage == "local-zfs"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ip=dhcp", None),
        ("ip=192.0.2.9/24,gw=192.0.2.1", "192.0.2.9"),
        ("ip=dhcp,ip6=2001:db8::9/64", "2001:db8::9"),
        ("ip6=auto", None),
    ],
)
def test_fixed_address(text: str, address: str | None) -> None:
    assert static_address(text) == address


def test_a_128_gib_bar_takes_256_gib_of_address_space() -> None:
    assert mmio_stride_mib(131072) == 131072
    assert mmio_stride_mib(131072 + 64 + 32) == 262144


@pytest.mark.parametrize(("bits", "fits"), [(40, False), (43, False), (44, True), (46, True), (52, True)])
def test_eight_cards_need_44_bits(bits: int, fits: bool) -> None:
    assert ("address space" not in subjects(host_phys_bits=bits)) is fits


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(1, 16), st.integers(1, 1 << 20), st.integers(36, 52))
def test_window_is_an_eighth_and_need_never_below_the_bars(count: int, bar_mib: int, bits: int) -> None:
    gpus = [{"mapping": f"gpu{index}"} for index in range(count)]
    needed, window, space = address_space(spec(gpus=gpus, gpu_bar_mib=bar_mib, host_phys_bits=bits))
    assert count * bar_mib <= needed < 2 * count * bar_mib + count
    assert (window, space) == ((1 << bits) // 8 >> 20, (1 << bits) >> 20)


def test_start_limit_is_proxmoxs() -> None:
    assert spec(memory_mib=524288).start_seconds == 2048
    assert spec(memory_mib=524288, gpus=[]).start_seconds == 512
    assert spec(memory_mib=16384).start_seconds == 300
    assert spec(start_timeout_seconds=60).start_seconds == 60
