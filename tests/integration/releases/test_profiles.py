"""One host with SGLang 0.5.9 and 0.5.23 on the CPU: both parse every profile's arguments, systemd judges its unit, and
the hub's client of each brings a model."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import yaml
from hosts import ROOT, SUPPORT, VENV, Host, Run
from packaging.version import Version
from processes import watched_processes

sys.path.insert(0, str(SUPPORT))

from hub import COMMIT, REPOSITORY, Hub

DATA = ROOT / "roles/sglang_server/vars"
PROFILES = yaml.safe_load((DATA / "profiles.yml").read_text())["__sglang_server_profiles"]
RENAMED = yaml.safe_load((DATA / "main.yml").read_text())["__sglang_server_renamed"]
VENVS = {"0.5.9": VENV, "0.5.23": f"{VENV}-0.5.23"}
CLIENTS = {"0.5.9": "0.36.2", "0.5.23": "1.33.0"}
CHECKER = "/usr/local/lib/sglang-sm120/check_arguments.py"
CPU = "SGLANG_USE_CPU_ENGINE=1 PYTHONWARNINGS=ignore"
TOKEN = "hf_" + "z9Y8" * 8
FILES = {
    "config.json": b'{"vocab_size": 2048}\n',
    **{f"part-{n}.safetensors": bytes([n]) * 150_000 for n in range(5)},
}


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    made: Host = make_host("profiles", 9)
    made.sh("useradd --system --home-dir /var/lib/sglang --create-home sglang")
    run = made.play(
        *("--tags", "runtime"),
        playbook="playbooks/runtime.yml",
        sglang_runtime_release="0.5.23",
        sglang_runtime_venv=VENVS["0.5.23"],
    )
    assert run.rc == 0, run.stdout
    return made


def profile_of(name: str) -> Any:
    own = PROFILES[name]
    like = PROFILES[own.get("like", "default")]
    return {part: {**like[part], **own[part]} for part in ("arguments", "environment")}


def preload(release: str) -> str:
    return f"LD_PRELOAD={VENVS[release]}/lib/python3.11/site-packages/nvidia/cu13/lib/libcudart.so.13"


@pytest.fixture(scope="module", params=sorted(VENVS))
def rendered(request: pytest.FixtureRequest, host: Host) -> tuple[str, str]:
    """(release, folder on the host) with every profile's files for that release."""
    release: str = request.param
    folder = f"/srv/profiles/{release}"
    run = host.play(
        playbook="tests/integration/releases/profiles.yml",
        folder=folder,
        sglang_runtime_release=release,
        sglang_runtime_venv=VENVS[release],
    )
    assert run.rc == 0, run.stdout
    return release, folder


def test_the_installed_sglang_parses_every_profile(host: Host, rendered: tuple[str, str]) -> None:
    release, folder = rendered
    python = f"env {CPU} {preload(release)} {VENVS[release]}/bin/python {CHECKER}"
    host.sh(f"{python} {folder}/*/arguments.yaml")
    old = {each["new"]: each["old"] for each in RENAMED if Version(each["since"]) > Version(release)}
    for profile in PROFILES:
        written = yaml.safe_load(host.read(f"{folder}/{profile}/arguments.yaml"))
        wanted = profile_of(profile)["arguments"]
        assert (written["model-path"], written["host"]) == ("/srv/models/demo", "127.0.0.1")
        assert ("cuda-graph-max-bs-decode" in written) == (
            "cuda-graph-max-bs-decode" in wanted and release != "0.5.9"
        )
        named = {old.get(name, name): value for name, value in wanted.items()}
        assert {name: written.get(name) for name in named} == named
        lines = host.read(f"{folder}/{profile}/environment").splitlines()[1:]
        environment = {name: json.loads(value) for name, _, value in (line.partition("=") for line in lines)}
        for name, value in profile_of(profile)["environment"].items():
            assert environment[name], name
            assert "{{" in value or environment[name] == value, name
    # The same call does refuse: a word of the other release, and one of none.
    for wrong in ("cuda-graph-max-bs-decode" if release == "0.5.9" else "nsa-decode-backend", "no-such"):
        host.sh("cat > /srv/wrong.yaml", json.dumps({"model-path": "/srv/models/demo", wrong: 8}))
        code, text = host.execute(f"{python} {folder}/default/arguments.yaml /srv/wrong.yaml")
        assert code == 1
        assert wrong in text


def test_systemd_accepts_every_unit(host: Host, rendered: tuple[str, str]) -> None:
    _, folder = rendered
    for profile in PROFILES:
        unit = f"{folder}/{profile}/sglang-{profile}.service"
        assert host.execute(f"systemd-analyze verify {unit}") == (0, "")
        code, text = host.execute(f"systemd-analyze security --no-pager --offline=true --threshold=50 {unit}")
        assert code == 0, text
    open_unit = "[Service]\nExecStart=/bin/true\n"
    host.sh("cat > /srv/open.service", open_unit)  # the threshold does refuse
    assert (
        host.execute("systemd-analyze security --no-pager --offline=true --threshold=50 /srv/open.service")[0]
        != 0
    )


# --- a model from a hub ----------------------------------------------------------------------------------------------
def model(host: Host, release: str, hub: Hub, *options: str, **given: Any) -> Run:
    return host.play(
        *("--tags", "model", *options),
        playbook="playbooks/runtime.yml",
        sglang_runtime_venv=VENVS[release],
        sglang_model_source="hub",
        sglang_model_repository=REPOSITORY,
        sglang_model_revision=COMMIT,
        sglang_model_endpoint=hub.url,
        sglang_model_path=f"/srv/models/hub-{release}",
        sglang_model_files_at_a_time=3,
        **given,
    )


@pytest.mark.parametrize("release", sorted(VENVS))
def test_a_model_from_a_hub(host: Host, release: str) -> None:
    folder, token = f"/srv/models/hub-{release}", "/root/hub-token"
    site = f"{VENVS[release]}/lib/python3.11/site-packages"
    assert host.exists(f"{site}/huggingface_hub-{CLIENTS[release]}.dist-info")
    host.sh(f"install -m 0600 /dev/stdin {token}", f"{TOKEN}\n")
    with Hub(dict(FILES), token=TOKEN).running() as hub:
        run = model(host, release, hub)
        assert (run.rc, run.changed) == (2, 0), run.stdout
        assert len(run.failures()) == 1
        assert "sglang_model_token_file" in run.failures()[0]
        assert not host.exists(folder)

        with watched_processes(TOKEN, where=("cmdline", "environ")) as caught:
            run = model(host, release, hub, "-vvv", sglang_model_token_file=token)
        assert run.rc == 0, run.stdout
        assert caught == set()
        told = [
            path for path in run.folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
        ]
        assert told == []
        assert host.execute(f"grep -rslF {TOKEN} {folder} /root/.ansible /root/.ansible_async /root/.cache")[
            1:
        ] == ("",)
        assert [f"files {n} to {n + 2} of 6" in run.stdout for n in (1, 4)] == [True, True]

        asked = len(hub.requests)
        run = model(host, release, hub, sglang_model_token_file=token)
        assert (run.rc, run.changed) == (0, 0), run.stdout
        assert len(hub.requests) == asked
    found = host.sh(
        f"cd {folder} && find . -type f ! -name .sm120-model.json -size -1000k | sort && cat config.json"
    )
    assert found.split() == [*sorted(f"./{name}" for name in FILES), '{"vocab_size":', "2048}"]
    for name in FILES:
        assert host.sh(f"runuser -u sglang -- stat -c %s {folder}/{name}").strip() == str(len(FILES[name]))
