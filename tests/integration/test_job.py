"""The whole main job on one host, by an operator who is not root, with a password for sudo and an API key."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
from hosts import COMMUNICATOR, SITE, VENV, Host, Run
from processes import watched_processes

KEY = f"key-{secrets.token_hex(12)}"
PASSWORD = f"pass-{secrets.token_hex(12)}"
OUTPUT_TOKENS = 32
PSS_LIMIT_BYTES = 3 * 2**30
KEPT = "/opt/kept-venv"
ONE_LINER = "from flashinfer.jit.comm import gen_trtllm_comm_module as g; g()"

Before = dict[str, Any]


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    made: Host = make_host("job", 0)
    made.sh(f"cp -a {VENV} {KEPT}")  # so that the job can be done again without minutes of installing
    made.sh("useradd --create-home --shell /bin/bash --groups sudo ops")
    made.sh("chpasswd", f"ops:{PASSWORD}\n")
    made.sh("cp -r /root/.ssh /home/ops/ && chown -R ops: /home/ops/.ssh")
    made.variables = {
        "ansible_user": "ops",
        "ansible_become_password": PASSWORD,
        "sglang_server_api_key": KEY,
    }
    return made


def jit_module(host: Host) -> tuple[int, str]:
    """What FlashInfer says to SM120's wish for the all-reduce kernels."""
    preload = f"LD_PRELOAD={SITE}/nvidia/cu13/lib/libcudart.so.13"  # FlashInfer wants it on import
    setting = f"HOME=$home PYTHONDONTWRITEBYTECODE=1 FLASHINFER_CUDA_ARCH_LIST=12.0a {preload}"
    command = f"{setting} {VENV}/bin/python -c '{ONE_LINER}'"
    return host.execute(f"home=$(mktemp -d); {command}; code=$?; rm -r $home; exit $code")


def names(host: Host) -> set[str]:
    """All that a play may leave: paths, accounts and units; not what ssh, sudo, Python and systemd leave."""
    paths = host.sh("find /etc /home /opt /root /run /srv /tmp /usr /var 2>/dev/null; true").splitlines()
    accounts = host.sh("getent passwd; getent group").splitlines()
    units = host.sh("systemctl list-units --all --plain --no-legend 'sglang*' 'sm120*'").splitlines()
    theirs = re.compile(r"/(\.ansible\w*|\.?sudo\w*|__pycache__|log|systemd\S*|user|utmp)(/|$)")
    ours = re.compile("sglang|sm120")
    return {*(path for path in paths if ours.search(path) or not theirs.search(path)), *accounts, *units}


def generated(host: Host) -> int:
    status, page = host.request("/metrics", key=KEY)
    assert status == 200, page
    lines = [line for line in page.splitlines() if line.startswith("sglang:generation_tokens_total")]
    assert lines
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


@pytest.fixture(scope="module")
def before(host: Host) -> Before:
    """The host before the first play."""
    code, text = jit_module(host)
    assert host.differing() == set()
    host.sh("touch /before")
    communicator = host.sha256(COMMUNICATOR)
    return {"code": code, "text": text, "communicator": communicator, "names": names(host)}


@pytest.fixture(scope="module")
def deployed(host: Host, before: Before) -> Run:
    with watched_processes(KEY, PASSWORD) as caught:
        run = host.play("--diff")
    assert run.rc == 0, run.stdout
    assert caught == set()
    return run


def test_kernels_are_refused_before_and_built_after(host: Host, before: Before, deployed: Run) -> None:
    assert before["code"] == 1
    assert "No supported CUDA architectures found for major versions [9, 10]" in before["text"]
    assert jit_module(host) == (0, "")


def test_the_host_seen_without_ansible(host: Host, before: Before, deployed: Run) -> None:
    assert len(host.differing()) == 6
    assert host.sha256(COMMUNICATOR) != before["communicator"]
    assert len(host.manifest()["entries"]) == 2
    assert host.active() == "active"
    pid = host.sh("systemctl show -P MainPID sglang-main.service").strip()
    arguments = host.read(f"/proc/{pid}/cmdline").split("\0")
    assert arguments[1:] == [
        *("-m", "sglang.launch_server", "--config", "/etc/sglang-sm120/main/arguments.yaml", "")
    ]
    listening = [line.split()[3] for line in host.sh(f"ss -Hltnp | grep pid={pid},").splitlines()]
    assert listening == [f"127.0.0.1:{host.server_port}"]
    assert host.sh(f"stat -c %U /proc/{pid}").strip() == "sglang"
    arguments_file = host.read("/etc/sglang-sm120/main/arguments.yaml")
    assert "enable-flashinfer-allreduce-fusion: true" in arguments_file


def test_the_key_opens_and_nothing_else_does(host: Host, deployed: Run) -> None:
    assert host.generates(KEY) == 4
    for wrong in ("", KEY[:-1]):
        assert host.request("/generate", {"text": "x"}, wrong)[0] == 401


def test_secrets_stand_nowhere(host: Host, deployed: Run) -> None:
    for secret in (KEY, PASSWORD):
        assert secret not in host.sh("systemctl cat sglang-main.service && ps -eo args")
        told = [*deployed.folder.rglob("*"), *(host.folder / "artifacts").rglob("*")]
        holding = [path for path in told if path.is_file() and secret.encode() in path.read_bytes()]
        assert holding == []
        readable = "find / /run /tmp -xdev -type f -newer /before -perm -004 -size -50M"
        assert host.sh(f"{readable} -print -quit")
        assert host.execute(f"{readable} -exec grep -lF -e {secret} {{}} + 2>/dev/null")[1] == ""
    holders = host.sh(
        f"grep -rslF -e {KEY} /etc /var/lib/sglang /var/lib/sglang-sm120 /home /run || true"
    ).split()
    assert holders == ["/etc/sglang-sm120/main/arguments.yaml"]
    assert host.sh("stat -c %a:%U /etc/sglang-sm120/main/arguments.yaml").strip() == "600:sglang"


def test_memory(host: Host, deployed: Run) -> None:
    pss = host.sh("cat $(pgrep -u sglang | sed 's,.*,/proc/&/smaps_rollup,') | grep ^Pss:").splitlines()
    assert len(pss) >= 3
    assert sum(int(line.split()[1]) * 1024 for line in pss) < PSS_LIMIT_BYTES


def test_second_run_changes_nothing_and_every_token_is_accounted_for(host: Host, deployed: Run) -> None:
    started, first = host.started(), generated(host)
    run = host.play()
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert host.started() == started
    measured = run.results("sglang_throughput")
    assert [rung["concurrency"] for each in measured for rung in each["rungs"]] == [1, 8]
    for rung in (rung for each in measured for rung in each["rungs"]):
        requests = rung["concurrency"] * 2
        assert (rung["completed"], rung["failed"], rung["valid"]) == (requests, 0, True)
        assert rung["output_tokens"] == requests * OUTPUT_TOKENS
        assert rung["tokens_requested"] == rung["output_tokens"] + rung["warmup"]["tokens_received"]
    asked = sum(each["tokens_requested"] for each in measured)
    probes = sum(each["evidence"]["generation"]["completion_tokens"] for each in run.results("sglang_health"))
    assert probes > 0
    assert generated(host) - first == asked + probes


def test_the_report_holds_what_was_measured(host: Host, deployed: Run) -> None:
    folder = max((host.folder / "artifacts/job").iterdir())
    told = json.loads((folder / "run.json").read_text())
    assert [rung["valid"] for rung in told["instances"][0]["rungs"]] == [True, True]
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert re.findall(r"""(?:src|href)=["'](?!#|data:)|url\((?!["']?(?:#|data:))|@import""", page) == []


def test_a_missed_threshold_fails_the_play_with_the_figures(host: Host, deployed: Run) -> None:
    thresholds = [
        {"concurrency": 8, "figure": "output_tokens_per_second", "minimum": 1e6},
        {"figure": "tpot_ms.mean", "maximum": 0.5e-3},
        {"figure": "e2e_ms.p99", "maximum": 1e9},  # reached
    ]
    run = host.play(playbook="playbooks/verify.yml", sglang_verify_thresholds=thresholds)
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert run.failed_tasks() == ["Refuse figures beyond their thresholds"]
    found = {rung["concurrency"]: rung for told in run.results("sglang_throughput") for rung in told["rungs"]}
    rate = found[8]["output_tokens_per_second"]
    reasons = [
        f"main, concurrency 8: wanted output_tokens_per_second >= 1000000.0, found {rate}",
        *(
            f"main, concurrency {rung}: wanted tpot_ms.mean <= 0.0005, found {found[rung]['tpot_ms']['mean']}"
            for rung in (1, 8)
        ),
    ]
    (message,) = run.failures()
    assert message.startswith(". ".join(reasons) + ". Look at ")
    folder = max((host.folder / "artifacts/job").iterdir())
    verdict = json.loads((folder / "run.json").read_text())["verdict"]
    assert (verdict["bad"], verdict["reasons"]) == (True, reasons)


def test_an_argument_that_sglang_does_not_know_leaves_the_server_running(host: Host, deployed: Run) -> None:
    snapshot, started = host.snapshot(), host.started()
    run = host.play("--tags", "serve", sglang_server_extra_arguments={"no-such-argument": 1})
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert len(run.failures()) == 2  # of the instance, and at the play's end
    assert "unrecognized arguments: --no-such-argument" in run.failures()[1]
    assert (host.snapshot(), host.started()) == (snapshot, started)
    assert host.generates(KEY) == 4


def test_a_preview_tells_a_restart(host: Host, deployed: Run) -> None:
    snapshot, started = host.snapshot(), host.started()
    run = host.play("--check", "--tags", "serve", sglang_server_max_running_requests=32)
    assert run.rc == 0, run.stdout
    told = [each["event_data"] for each in run.events if each["event"] == "runner_on_ok"]
    changed = [each["task"] for each in told if each["res"].get("changed")]
    assert "Stop sglang-main.service" in changed
    assert "Would start sglang-main.service" in run.stdout
    assert (host.snapshot(), host.started()) == (snapshot, started)


def test_revert_is_previewed_and_changes_nothing(host: Host, deployed: Run) -> None:
    host.plant()
    snapshot, started = host.snapshot(), host.started()
    run = host.play("--check", "--diff", "--tags", "revert")
    assert run.rc == 0, run.stdout
    assert run.changed > 0
    assert "-_is_sm120_supported = _is_cuda and is_sm120_supported()" in run.stdout
    assert "trtllm_comm" in run.stdout
    assert KEY not in run.stdout
    assert (host.snapshot(), host.started()) == (snapshot, started)


def test_revert_refuses_company(host: Host, deployed: Run) -> None:
    snapshot = host.snapshot()
    for tags in ("gates,revert", "never,gates", "never"):
        run = host.play("--tags", tags)
        assert (run.rc, run.changed) == (2, 0), run.stdout
        assert run.failed_tasks() == ["Refuse to revert beside anything else"]
    assert host.snapshot() == snapshot


def test_revert(host: Host, before: Before, deployed: Run) -> None:
    marker = host.plant()
    run = host.play("--tags", "revert")
    assert run.rc == 0, run.stdout
    assert host.differing() == set()
    assert host.sha256(COMMUNICATOR) == before["communicator"]
    assert host.manifest()["entries"] == {}
    assert host.sh("ls /var/lib/sglang-sm120/gates/pristine") == ""
    assert not host.exists(marker)
    assert "fusion" not in host.read("/etc/sglang-sm120/main/arguments.yaml")
    assert host.generates(KEY) == 4
    assert jit_module(host)[0] == 1

    snapshot, started = host.snapshot(), host.started()
    run = host.play("--tags", "revert")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert (host.snapshot(), host.started()) == (snapshot, started)

    run = host.play("--tags", "revert", sglang_server_state_after_revert="stopped")
    assert run.rc == 0, run.stdout
    assert host.active() == "inactive"
    assert host.sh("systemctl is-enabled sglang-main.service || true").strip() == "disabled"


def test_two_instances_and_a_new_name(host: Host, deployed: Run) -> None:
    """Applied again, over the reverted host: the gates open, and the second instance is another user's.

    Users that were made here go with their homes when nothing runs as them; `main` stays who it is.
    """
    marker = host.plant()
    ports = host.server_port, host.server_port + 1
    second = {"port": ports[1], "user": "sglang-b"}
    both = [{"instance": "main"}, {"instance": "old", **second}]
    tags = ("--tags", "gates,serve")
    run = host.play(*tags, sglang_server_instances=both)
    assert run.rc == 0, run.stdout
    assert not host.exists(marker)
    assert len(host.differing()) == 6
    assert [host.generates(KEY, port) for port in ports] == [4, 4]
    started = host.started()

    both[1] = {"instance": "new", **second, "user": "sglang-c"}
    run = host.play(*tags, sglang_server_instances=both)
    assert run.rc == 0, run.stdout
    assert [host.generates(KEY, port) for port in ports] == [4, 4]
    assert host.started() == started
    assert host.sh(r"find / -xdev \( -name 'sglang-old*' -o -name 'sglang-b' \)") == ""
    assert not host.exists("/etc/sglang-sm120/old")
    assert not host.exists("/run/sglang-old")
    assert "sglang-old" not in host.sh("systemctl list-units --all --no-legend 'sglang-*'")
    assert host.execute("id sglang-b")[0] == 1
    assert host.sh("ls /var/lib/sglang-sm120/users").split() == ["sglang", "sglang-c"]
    run = host.play(*tags, sglang_server_instances=both)
    assert (run.rc, run.changed) == (0, 0), run.stdout

    both[1]["home"] = "/srv/moved"
    run = host.play(*tags, sglang_server_instances=both)
    assert run.rc == 0, run.stdout
    assert host.generates(KEY, ports[1]) == 4
    assert host.started() == started
    assert host.sh("getent passwd sglang-c").split(":")[5] == "/srv/moved"
    assert not host.exists("/var/lib/sglang-c")


def test_teardown_leaves_nothing_and_all_of_it_comes_again(host: Host, before: Before, deployed: Run) -> None:
    run = host.play(playbook="playbooks/teardown.yml", teardown_confirm=host.name)
    assert run.rc == 0, run.stdout
    assert sorted(names(host) - before["names"]) == []
    ours = "/opt/sglang-sm120 /srv/models/demo /etc/sglang-sm120 /var/lib/sglang-sm120 /var/lib/sglang"
    assert [path for path in ours.split() if host.exists(path)] == []

    host.sh(f"mkdir {Path(VENV).parent} && mv {KEPT} {VENV}")
    assert host.differing() == set()
    run = host.play("--skip-tags", "verify")
    assert run.rc == 0, run.stdout
    assert len(host.differing()) == 6
    assert host.generates(KEY) == 4
