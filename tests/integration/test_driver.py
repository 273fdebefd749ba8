"""Driver, toolkit and guest tuning on a host with real apt, real dpkg and a repository with NVIDIA's names.

What stands in for hardware: `/sys` and `/proc` of two GPUs, the kernel's own programs (modprobe, modinfo,
update-initramfs, shutdown) and an nvidia-smi that answers with a real machine's recorded text.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import ROOT, SUPPORT, Host, Run

sys.path.insert(0, str(SUPPORT))
import nvidia_packages

RECORD = ROOT / "tests/unit/data/nvidia-smi-q-h200-x2.txt"
TABLES = ROOT / "tests/unit/data/nvidia-smi-tables-h200-x2.txt"
DRIVER = "playbooks/driver.yml"
MACHINE = "python3 /srv/made-up/machine.py"
# Everything that the roles write below, and all that apt and dpkg know.
STATE = r"""
cd / && find etc/apt etc/modprobe.d etc/modules-load.d etc/sysctl.d etc/security etc/systemd/system usr/share/keyrings \
  var/lib/apt/lists var/lib/sglang-sm120 lib/modules usr/local -printf '%y %m %U:%G %p %l\n' 2>/dev/null | sort
find etc/apt etc/modprobe.d etc/modules-load.d etc/sysctl.d etc/security etc/systemd/system usr/share/keyrings -type f \
  -exec sha256sum {} + 2>/dev/null | sort -k2
dpkg --get-selections; apt-mark showhold; apt-mark showmanual; cat /proc/sys/kernel/msgmax
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """Variables that name repositories with NVIDIA's names, a folder for each distribution, served over HTTP."""
    kernel = subprocess.check_output(["uname", "-r"], text=True).strip()
    sha256 = nvidia_packages.make(folder, kernel)
    handler = functools.partial(Quiet, directory=str(folder / "repository"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "nvidia_repository_url": f"http://127.0.0.1:{server.server_port}",
            "nvidia_repository_key_sha256": sha256,
        }
        server.shutdown()


def set_up(host: Host, repository: dict[str, str]) -> dict[str, str]:
    """Give a host its stand-ins for two GPUs and no source of packages but this one; the variables that say so."""
    host.sh(
        "mkdir -p /srv/made-up && cat > /srv/made-up/machine.py", (SUPPORT / "gpu_machine.py").read_text()
    )
    answer = RECORD.read_text().replace("NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Server Edition")
    host.sh(f"{MACHINE} set_up", answer)
    host.sh("cat > /srv/made-up/smi-tables", TABLES.read_text())
    distribution = host.sh(". /etc/os-release; echo $ID").strip()
    host.sh(": > /etc/apt/sources.list; rm -f /etc/apt/sources.list.d/*; apt-get update -qq")
    return {
        **repository,
        "nvidia_repository_url": f"{repository['nvidia_repository_url']}/{distribution}",
        "nvidia_repository_contrib_url": "",
        "cuda_toolkit_host_compiler": "lab-compiler",
    }


@pytest.fixture(scope="module")
def host(make_host: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made: Host = make_host("driver", 10, baked=False)
    with served(tmp_path_factory.mktemp("nvidia")) as repository:
        made.variables = dict(set_up(made, repository))
        yield made


@pytest.fixture(scope="module")
def distribution(host: Host) -> nvidia_packages.Distribution:
    return nvidia_packages.DISTRIBUTIONS[host.variables["nvidia_repository_url"].rpartition("/")[2]]


def state(host: Host) -> list[str]:
    return host.sh(STATE).splitlines()


def assert_same(before: list[str], after: list[str]) -> None:
    assert sorted(set(before) ^ set(after)) == []


def assert_refused(host: Host, run: Run, before: list[str], *named: str) -> None:
    """One message that names these, and nothing on the host is different."""
    assert run.rc == 2, run.stdout
    assert len(run.failures()) == 1, run.failures()
    assert [name for name in named if name not in run.failures()[0]] == [], run.failures()[0]
    assert_same(before, state(host))


def installed(host: Host) -> dict[str, str]:
    """{package: version} of the driver's, with a mark on those on hold."""
    text = host.sh("dpkg-query -W -f '${Package}|${Version}|${db:Status-Want}\\n'")
    rows = [line.split("|") for line in text.splitlines()]
    parts = ("nvidia-", "libnvidia-", "libcuda1")
    return {name: f"{version} {want}" for name, version, want in rows if version and name.startswith(parts)}


def initramfs(host: Host) -> int:
    """How often one was made, for all kernels."""
    calls = host.sh("cat /srv/made-up/initramfs-calls 2>/dev/null || true").splitlines()
    assert set(calls) <= {"-u -k all"}
    return len(calls)


@pytest.fixture(scope="module")
def pristine(host: Host) -> list[str]:
    return state(host)


def test_check_mode_on_a_fresh_host(host: Host, pristine: list[str]) -> None:
    run = host.play("--check", "--diff", playbook=DRIVER, guest_tuning_enabled=True)
    assert run.rc == 0, run.stdout
    assert run.changed >= 4
    assert "blacklist nova_core" in run.stdout
    assert_same(pristine, state(host))


GUEST = {
    "sglang_runtime_device": "cuda",
    "sglang_runtime_release": "0.5.23",
    "sglang_server_profile": "default",
    "sm120_gates_policy": "measured",
}


def guest(host: Host, *options: str, **values: Any) -> Run:
    run = host.play(*options, "--tags", "guest", **{**GUEST, **values})
    assert run.changed == 0
    return run


def unfit(run: Run) -> list[str]:
    """What the one message that refuses a guest complains about."""
    assert run.rc == 2, run.stdout
    (failure,) = run.failures()
    head, *complaints = failure.splitlines()
    assert head == "This guest is not fit to serve. To correct:"
    return complaints


def told(run: Run) -> Any:
    """What the only message of a run says."""
    (shown,) = run.results("ansible.builtin.debug")
    return shown["msg"]


def test_a_guest_without_a_driver_is_refused_but_not_in_a_preview(host: Host, pristine: list[str]) -> None:
    missing = "driver: wanted: nvidia-smi; found: not installed; do: run playbooks/driver.yml"
    assert f"- {missing}" in unfit(guest(host))
    run = guest(host, "--check")
    assert run.rc == 0, run.stdout
    assert told(run)[0].startswith("check mode: the driver is not at work yet.")
    assert f"error: {missing}" in told(run)
    assert_same(pristine, state(host))


# OLD and MODULES stand for the distribution's package names, OLD_DEB for a file in the repository.
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "a key with another checksum": (
        "true",
        {"nvidia_repository_key_sha256": "0" * 64},
        ("0" * 64, nvidia_packages.KEYRING),
        "true",
    ),
    "a repository that is not reached": (
        "true",
        {"nvidia_repository_url": "http://127.0.0.1:9", "key": True},
        ("http://127.0.0.1:9", "connect to 127.0.0.1:9"),
        "true",
    ),
    "a dependency on hold": (
        'python3 -c \'import urllib.request as r; r.urlretrieve("URL/OLD_DEB", "/srv/old.deb")\''
        " && dpkg -i /srv/old.deb && apt-mark hold OLD",
        {},
        ("OLD", "hold"),
        "apt-mark unhold OLD && dpkg -P OLD && rm /srv/old.deb",
    ),
    "a full disk": (
        "mkdir -p /boot && mount -t tmpfs -o size=8m tmpfs /boot",
        {},
        ("/boot", "8 MiB", "256 MiB"),
        "umount /boot",
    ),
    "a build that fails": (
        "touch /srv/made-up/dkms-fails",
        {},
        ("MODULES", "Bad return status"),
        "rm /srv/made-up/dkms-fails",
    ),
    "proprietary modules": (
        f"{MACHINE} driver 580.159.04 proprietary",
        {},
        ("open", "580.159.04"),
        f"{MACHINE} clear",
    ),
    "a library of another version": (
        "install -m 755 /dev/stdin /usr/bin/nvidia-smi <<'END'\n"
        + nvidia_packages.NVIDIA_SMI.replace("VERSION", "580.163.01")
        + f"END\n{MACHINE} driver 580.159.04 open",
        {},
        ("580.159.04", "580.163", "reboot"),
        f"rm /usr/bin/nvidia-smi; {MACHINE} clear",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_message_and_nothing_changed(
    host: Host, distribution: nvidia_packages.Distribution, pristine: list[str], case: str
) -> None:
    prepare, values, named, undo = REFUSED[case]
    old, url = distribution.too_old, host.variables["nvidia_repository_url"]
    given = dict(values)
    if given.pop("key", False):
        given["nvidia_repository_key_url"] = f"{url}/{nvidia_packages.KEYRING}"

    def here(text: str) -> str:
        text = text.replace("URL", url).replace("OLD_DEB", old.file).replace("OLD", old.name)
        return text.replace("MODULES", distribution.modules)

    host.sh(here(prepare))
    try:
        before = state(host)
        assert_refused(host, host.play(playbook=DRIVER, **given), before, *map(here, named))
    finally:
        host.sh(here(undo))
    assert_same(pristine, state(host))


FETCH = "import sys, urllib.request as r; r.urlretrieve(sys.argv[1], '/srv/a.deb')"


def test_a_good_driver_of_somebody_else_is_left_alone_or_adopted(
    host: Host, distribution: nvidia_packages.Distribution, pristine: list[str]
) -> None:
    for deb in distribution.by_hand():
        url = f"{host.variables['nvidia_repository_url']}/{deb.file}"
        host.sh(f'python3 -c "{FETCH}" {url} && dpkg -i /srv/a.deb && rm /srv/a.deb')
    host.sh(f"{MACHINE} driver 590.48.01 open")
    before = state(host)
    run = host.play(playbook=DRIVER)
    assert run.rc == 0, run.stdout
    assert run.changed == 0
    assert_same(before, state(host))
    adopted = {"nvidia_driver_module_options": {}, "nvidia_driver_power_limit_watts": 500}
    run = host.play(playbook=DRIVER, nvidia_driver_adopt=True, **adopted)
    assert run.rc == 0, run.stdout
    assert set(installed(host).values()) == {f"{nvidia_packages.NEWER} hold"}
    assert re.findall(r"Current Power Limit +: (\d+)", host.sh("nvidia-smi -q")) == ["500"] * 2
    assert not host.exists("/etc/apt/sources.list.d/nvidia-sm120.sources")
    run = host.play(playbook=DRIVER, nvidia_driver_state="absent")
    assert run.rc == 0, run.stdout
    assert_same(before, state(host))
    names = " ".join(deb.name for deb in distribution.by_hand())
    host.sh(f"dpkg -P {names}; rm -r /run/made-up-gpus; {MACHINE} clear")
    assert_same(pristine, state(host))


SETTINGS = {
    "nvidia_driver_power_limit_watts": 450,
    "nvidia_driver_registry_words": {"ForceP2P": "0x11", "RMForceP2PType": 1},
    "guest_tuning_enabled": True,
    "guest_tuning_sysctl": {"kernel.msgmax": 8193},  # of the container alone, unlike the defaults
}


def test_a_driver_is_installed_held_and_set_up(
    host: Host, distribution: nvidia_packages.Distribution, pristine: list[str]
) -> None:
    made = initramfs(host)
    run = host.play(playbook=DRIVER, **SETTINGS)
    assert run.rc == 0, run.stdout
    now = installed(host)
    assert {f"{nvidia_packages.DRIVER} hold"} == set(now.values()), now  # though a newer branch is offered
    assert distribution.driver <= set(now)
    assert "nvidia" not in host.sh("apt-get -s dist-upgrade | grep ^Inst || true")
    assert host.read("/proc/driver/nvidia/params") == 'RegistryDwords: "ForceP2P=0x11;RMForceP2PType=1"\n'
    assert host.read("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm") == "Y\n"
    told = host.sh("nvidia-smi -q")
    assert re.findall(r"Persistence Mode +: (\w+)", told) == ["Enabled"] * 2
    assert re.findall(r"Current Power Limit +: (\d+)", told) == ["450"] * 2
    assert host.sh(
        "systemctl is-enabled sm120-gpus.service; systemctl is-active nvidia-persistenced"
    ).split() == ["enabled", "active"]
    assert initramfs(host) == made + 1
    assert host.read("/proc/sys/kernel/msgmax") == "8193\n"
    modes = host.sh("find /var/lib/sglang-sm120 -type f -printf '%m\\n' | sort -u")
    assert modes.split() == ["600"]
    assert "cuda-keyring" not in host.sh("dpkg-query -W -f '${Package}\\n'")
    host.sh("systemd-analyze verify /etc/systemd/system/sm120-gpus.service")


def test_a_second_run_changes_nothing_and_is_short(host: Host) -> None:
    before = state(host)
    run = host.play(playbook=DRIVER, **SETTINGS)
    assert run.rc == 0, run.stdout
    assert run.changed == 0
    assert_same(before, state(host))
    assert len(run.tasks()) <= 25, run.tasks()


@pytest.fixture
def at_work(host: Host) -> Iterator[dict[str, str]]:
    """Programs on the cards, of a server of ours on the second and of somebody else on the first: {unit: pid}."""
    rows, pids = [], {}
    for address, unit, name in (("06", "train", "python3"), ("07", "sglang-main", "sglang::scheduler")):
        host.sh(f"systemd-run --quiet --unit {unit} sleep 900")
        pids[unit] = host.sh(f"systemctl show -P MainPID {unit}.service").strip()
        rows.append(f"00000000:00:{address}.0, {pids[unit]}, {name}, 120000\n")
    host.sh("mkdir -p /run/made-up-gpus && cat > /run/made-up-gpus/processes", "".join(rows))
    record = {"unit": "sglang-main.service", "user": "sglang", "url": "http://127.0.0.1:9"}
    host.sh(
        "mkdir -p /etc/sglang-sm120/main && cat > /etc/sglang-sm120/main/instance.json", json.dumps(record)
    )
    yield pids
    host.sh(
        "systemctl stop train sglang-main 2>/dev/null; rm -r /run/made-up-gpus/processes /etc/sglang-sm120; true"
    )


def test_a_guest_serves_what_it_has_cards_for(host: Host) -> None:
    run = guest(host, sglang_server_tensor_parallel_size=2)
    assert run.rc == 0, run.stdout
    run = guest(
        host,
        sglang_server_instances=[{"instance": "a"}, {"instance": "b", "port": 9, "profile": "glm5-nvfp4"}],
    )
    wanted = (
        "- gpus: wanted: 8 GPUs (tensor parallel size times pipeline stages); found: 2; do: choose a profile"
    )
    (complaint,) = unfit(run)
    assert complaint.startswith(wanted)


def test_a_card_is_taken_by_others_not_by_our_own_server(host: Host, at_work: dict[str, str]) -> None:
    (complaint,) = unfit(guest(host))
    assert complaint.startswith("- GPU 0 (0000:00:06.0): wanted: no process but those of our units")
    assert f"python3 (pid {at_work['train']}, train.service, 120000 MiB)" in complaint
    host.sh("systemctl stop train && sed -i /python3/d /run/made-up-gpus/processes")
    run = guest(host)
    assert run.rc == 0, run.stdout


def test_status_is_a_table_and_changes_nothing(host: Host, at_work: dict[str, str]) -> None:
    before = state(host)
    run = host.play(playbook="playbooks/status.yml", sglang_runtime_device="cuda")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert_same(before, state(host))
    table = [" ".join(line.split()) for line in told(run).splitlines()]
    assert table[0] == "driver 580.159.04 (open modules), CUDA 13.0, 2 GPUs"
    card = "0 0000:00:06.0 NVIDIA RTX PRO 6000 Blackwell Server Edition 12.0 143156/143771 262144 gen5 x16 0 102/450 0"
    assert card in table
    assert {"peer access: every pair", "paths: NV18"} <= set(table)
    used = (
        f"on 0000:00:07.0: sglang::scheduler, pid {at_work['sglang-main']}, 120000 MiB, sglang-main.service"
    )
    assert used in table
    assert "instance main (http://127.0.0.1:9): starting" in table
    finding = table.index("error: GPU 0 (0000:00:06.0)")
    assert table[finding + 1] == "wanted: no process but those of our units on the GPU"


def test_a_power_limit_that_the_card_does_not_take(host: Host) -> None:
    before = state(host)
    run = host.play(playbook=DRIVER, **{**SETTINGS, "nvidia_driver_power_limit_watts": 900})
    assert_refused(host, run, before, "900", "200", "700")


def test_the_toolkit_by_apt(host: Host) -> None:
    before = state(host)
    options = ("--tags", "cuda")
    values = {"cuda_toolkit_method": "apt"}
    run = host.play(*options, playbook="playbooks/probe.yml", **values)
    assert run.rc == 0, run.stdout
    facts = [
        event["event_data"]["res"]["ansible_facts"]
        for event in run.events
        if "ansible_facts" in event.get("event_data", {}).get("res", {})
    ]
    assert facts[-1]["cuda_toolkit_home"] == "/usr/local/cuda-13.0"
    assert "compute_120" in facts[-1]["cuda_toolkit_facts"]["architectures"]
    again = host.play(*options, playbook="playbooks/probe.yml", **values)
    assert (again.rc, again.changed) == (0, 0), again.stdout
    record = json.loads(host.read("/var/lib/sglang-sm120/cuda_toolkit/packages.json"))
    assert {"cuda-nvcc-13-0", "cuda-cudart-13-0", "lab-compiler"} <= set(record["installed"])
    assert before != state(host)


@pytest.mark.parametrize("path", [":/usr/local/cuda", "/usr/local/cuda:/opt/cuda"])
def test_a_cuda_home_that_is_no_single_folder(host: Host, path: str) -> None:
    before = state(host)
    values = {"cuda_toolkit_method": "existing", "cuda_toolkit_path": path}
    run = host.play("--tags", "cuda", playbook="playbooks/probe.yml", **values)
    assert_refused(host, run, before, path)


def test_an_nvcc_that_is_too_old(host: Host) -> None:
    old = (
        nvidia_packages.NVCC.replace("13.0", "12.4")
        .replace("compute_120", "compute_89")
        .replace("compute_121", "compute_80")
    )
    host.sh(
        "mkdir -p /opt/cuda-12.4/bin && cat > /opt/cuda-12.4/bin/nvcc && chmod 755 /opt/cuda-12.4/bin/nvcc",
        old,
    )
    before = state(host)
    values = {"cuda_toolkit_method": "existing", "cuda_toolkit_path": "/opt/cuda-12.4"}
    run = host.play("--tags", "cuda", playbook="playbooks/probe.yml", **values)
    assert_refused(host, run, before, "compute_120", "12.4", "cuda_toolkit_method")


def test_teardown_leaves_the_host_as_it_was(host: Host, pristine: list[str]) -> None:
    made = initramfs(host)
    run = host.play(playbook="playbooks/teardown.yml", teardown_confirm=host.name)
    assert run.rc == 0, run.stdout
    assert host.read("/run/made-up-gpus/watts") == "700\n"  # the cards' own limit again
    host.sh(f"{MACHINE} clear")
    assert_same(pristine, state(host))
    assert initramfs(host) == made + 1


def test_again_under_nouveau_with_a_reboot(host: Host, pristine: list[str]) -> None:
    host.sh(f"{MACHINE} nouveau")
    run = host.play(playbook=DRIVER, **SETTINGS)
    assert run.rc == 2, run.stdout
    assert len(run.failures()) == 1, run.failures()
    assert [word for word in ("nouveau", "nvidia_driver_reboot") if word not in run.failures()[0]] == []
    run = host.play(playbook=DRIVER, nvidia_driver_reboot=True, **SETTINGS)
    assert run.rc == 0, run.stdout
    assert re.findall(r"Current Power Limit +: (\d+)", host.sh("nvidia-smi -q")) == ["450"] * 2
    assert not host.exists("/sys/module/nouveau")
    run = host.play(playbook=DRIVER, nvidia_driver_state="absent")
    assert run.rc == 0, run.stdout
    host.sh(f"{MACHINE} clear")
    assert_same(pristine, state(host))
