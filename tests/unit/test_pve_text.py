"""The normaliser: equal things have one form, different things have two."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from ansible.module_utils.sm120.pve_text import (
    canonical,
    format_property,
    is_true,
    parse_property,
    pci_address,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st

word = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.:/", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("hostpci0", "mapping=gpu0,pcie=1", "pcie=on,mapping=gpu0"),
        ("hostpci0", "mapping=gpu0,pcie=true", "pcie=yes,mapping=gpu0,rombar=1,x-vga=off"),
        ("hostpci12", "41:00.0,pcie=1", "host=0000:41:00.0,pcie=1"),
        ("hostpci0", "0000:C1:00", "c1:00"),
        ("hostpci0", "41:00.0;42:00.0", "host=0000:41:00.0;0000:42:00.0"),
        (
            "numa0",
            "cpus=0-31,hostnodes=0,memory=65536,policy=bind",
            "memory=065536,policy=bind,cpus=0-31,hostnodes=0",
        ),
        ("numa", True, "on"),
        (
            "net0",
            "virtio=bc:24:11:00:00:01,bridge=vmbr0",
            "bridge=vmbr0,macaddr=BC:24:11:00:00:01,model=virtio",
        ),
        ("net0", "virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=0", "virtio=BC:24:11:00:00:01,bridge=vmbr0"),
        ("cpu", "host,flags=+aes;-pcid", "cputype=host,flags=-pcid;+aes"),
        ("tags", "B;a", "a,b"),
        ("memory", 524288, "current=524288"),
        ("sshkeys", "ssh-rsa AAA+/= x", quote("ssh-rsa AAA+/= x\n", safe="")),
        ("sshkeys", "ssh-rsa A\nssh-rsa B", quote("ssh-rsa B\nssh-rsa A\n")),
        ("nameserver", "192.0.2.1 192.0.2.2", "192.0.2.1,192.0.2.2"),
        ("agent", 1, "enabled=1"),
        ("agent", "0", "enabled=0,type=virtio"),
        ("description", "text\n", "text"),
        ("cores", 64, "64"),
        ("boot", "order=scsi0", "order=scsi0"),
        ("scsi0", "local:vm-1-disk-0,iothread=on,size=1G", "file=local:vm-1-disk-0,size=1G,iothread=1"),
    ],
)
def test_same_thing_in_other_words(key: str, one: object, other: object) -> None:
    assert canonical(key, one) == canonical(key, other)
    assert same(key, one, other)


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("hostpci0", "mapping=gpu0,pcie=1", "mapping=gpu1,pcie=1"),
        ("hostpci0", "mapping=gpu0,pcie=1", "mapping=gpu0"),
        ("hostpci0", "mapping=gpu0,rombar=0", "mapping=gpu0"),
        ("hostpci0", "41:00", "41:00.0"),  # all functions, one function
        ("hostpci0", "0001:41:00.0", "41:00.0"),
        ("hostpci0", "41:00.0;42:00.0", "42:00.0;41:00.0"),
        ("cpu", "host", "host,phys-bits=host"),
        ("nameserver", "192.0.2.1 192.0.2.2", "192.0.2.2 192.0.2.1"),
        ("sshkeys", "ssh-rsa A+B", "ssh-rsa A B"),
        ("description", "007", "7"),
        ("name", "010", "10"),
        ("balloon", "0", "1024"),
        ("hostpci0", "mapping=gpu0,pcie=maybe", "mapping=gpu0,pcie=1"),
    ],
)
def test_different_things_stay_different(key: str, one: str, other: str) -> None:
    assert not same(key, one, other)


@pytest.mark.parametrize(
    ("key", "wanted", "equal"),
    [
        ("onboot", "0", True),
        ("onboot", "1", False),
        ("numa", "0", True),
        ("balloon", "0", False),
        ("args", "-x", False),
    ],
)
def test_absent_key_means_its_default(key: str, wanted: str, equal: bool) -> None:
    assert same(key, wanted, None) is equal


@settings(deadline=None)  # a busy machine is no failure
@given(st.dictionaries(word, word, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_property_strings_survive_and_order_means_nothing(parts: dict[str, str], random: object) -> None:
    assert parse_property(format_property(parts)) == parts
    names = list(parts)
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = format_property({name: parts[name] for name in names})
    assert canonical("ipconfig0", shuffled) == canonical("ipconfig0", format_property(parts))


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 255),
    st.integers(0, 31),
    st.none() | st.integers(0, 7),
    st.booleans(),
)
def test_pci_addresses_have_one_spelling(
    domain: int, bus: int, slot: int, function: int | None, upper: bool
) -> None:
    tail = "" if function is None else f".{function}"
    text = f"{domain:04x}:{bus:02x}:{slot:02x}{tail}"
    assert pci_address(text.upper() if upper else text) == text
    if domain == 0:
        assert pci_address(f"{bus:02x}:{slot:02x}{tail}") == text
    assert pci_address(pci_address(text)) == text


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.text("abcXYZ0189+/= @", min_size=1, max_size=20), max_size=4))
def test_url_encoding_of_keys_means_nothing(keys: list[str]) -> None:
    text = "\n".join(key.strip() for key in keys)
    assert canonical("sshkeys", quote(text, safe="")) == canonical("sshkeys", text)


@pytest.mark.parametrize("text", ["", "41", "41:00.8", "g1:00.0", "0000:41:00:0"])
def test_what_is_no_pci_address(text: str) -> None:
    with pytest.raises(ValueError, match="not a PCI address"):
        pci_address(text)


def test_what_is_neither_yes_nor_no() -> None:
    with pytest.raises(ValueError, match="perhaps"):
        is_true("perhaps")
    assert [is_true(text) for text in (1, "on", "Yes", True, 0, "off", "FALSE")] == [True] * 4 + [False] * 3


@pytest.mark.parametrize("text", ["a=1,a=2", "a"])
def test_broken_property_strings(text: str) -> None:
    with pytest.raises(ValueError, match="a"):
        parse_property(text)
