"""Lab hosts, playbook runs through ansible-runner, and a look at a host that does not go through Ansible."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / ".cache" / "lab"
SUPPORT = ROOT / "tests" / "support"
VENV = "/opt/sglang-sm120/venv"
SITE = f"{VENV}/lib/python3.11/site-packages"
STATE = "/var/lib/sglang-sm120/gates"
COMMUNICATOR = f"{SITE}/sglang/srt/layers/communicator.py"
RUN_TIMEOUT_SECONDS = 900
KILLED = -9

# What a play may change; not /home, where Ansible itself works as the ssh user. Times of change, not only contents:
# a file written with the same bytes was touched.
WATCHED = "/etc /opt /srv /usr/local /var/lib/sglang /var/lib/sglang-sm120"


@dataclass
class Run:
    """What one ansible-playbook did."""

    rc: int
    changed: int
    events: list[dict[str, Any]]
    stdout: str
    folder: Path

    def results(self, module: str) -> list[dict[str, Any]]:
        """Results of a module's tasks; of a loop, those of its items."""
        found = []
        for event in self.events:
            told = event.get("event_data", {})
            done = event["event"] in ("runner_item_on_ok", "runner_on_ok")
            if done and told.get("task_action") == module and "results" not in told["res"]:
                found.append(told["res"])
        return found

    def _failed(self) -> list[dict[str, Any]]:
        """What is told of the tasks that failed and were not expected to."""
        return [
            event["event_data"]
            for event in self.events
            if event["event"] in ("runner_on_failed", "runner_on_unreachable")
            and not event["event_data"].get("ignore_errors")
        ]

    def failures(self) -> list[str]:
        return [str(told["res"].get("msg")) for told in self._failed()]

    def failed_tasks(self) -> list[str]:
        return [told["task"] for told in self._failed()]

    def tasks(self) -> list[str]:
        return [
            each["event_data"]["task"] for each in self.events if each["event"] == "playbook_on_task_start"
        ]


class Host:
    """One lab host with its inventory: the demo's variables, another name, other ports."""

    def __init__(
        self, name: str, ssh_port: int, server_port: int, folder: Path, baked: bool = True, anew: bool = True
    ) -> None:
        self.name, self.ssh_port, self.server_port, self.folder = name, ssh_port, server_port, folder
        self.runs = 0
        self.variables: dict[str, Any] = {}
        if anew:
            self.lab("down", name)
        try:
            self.lab("up", name, "--port", str(ssh_port), *(["--baked"] if baked else []))
            self._connect()
        except BaseException:
            if anew:  # nobody has this host yet to remove it
                self.lab("down", name)
            raise

    def _connect(self) -> None:
        """Write the inventory, and log in."""
        inventory = self.folder / "inventory"
        inventory.mkdir()
        (inventory / "group_vars").symlink_to(ROOT / "inventories/demo/group_vars")
        settings = {
            "ansible_host": "127.0.0.1",
            "ansible_port": self.ssh_port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(LAB / "id_ed25519"),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={LAB / 'known_hosts'}",
            "sglang_server_port": self.server_port,
            "sglang_server_start_timeout_seconds": 900,  # a test machine may be busy
            "sglang_verify_artifacts_dir": str(self.folder / "artifacts"),
            "sglang_verify_repeats": 1,
            "sglang_verify_output_tokens": 32,
        }
        (inventory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {self.name: settings}}}))
        self.ssh = paramiko.SSHClient()
        self.ssh.load_host_keys(str(LAB / "known_hosts"))
        self.ssh.connect(
            "127.0.0.1", self.ssh_port, "root", key_filename=str(LAB / "id_ed25519"), look_for_keys=False
        )

    @staticmethod
    def lab(*arguments: str) -> None:
        subprocess.run([sys.executable, str(ROOT / "tools/lab.py"), *arguments], check=True)

    def remove(self) -> None:
        self.ssh.close()
        self.lab("down", self.name)

    # --- through Ansible ---------------------------------------------------------------------------------------------
    def play(
        self, *options: str, playbook: str = "site.yml", at: dict[str, str] | None = None, **extra: Any
    ) -> Run:
        """Run a playbook. `at` are settings of the callback at_task; `extra` are variables that win over all.

        Variables go by a file outside the runner's folder: what is in there afterwards is only what leaked.
        """
        self.runs += 1
        folder = self.folder / f"runner-{self.runs}"
        folder.mkdir()
        given = self.folder / f"given-{self.runs}.json"
        given.write_text(json.dumps({**self.variables, **extra}))
        (folder / "env").mkdir()
        (folder / "env/settings").write_text(json.dumps({"job_timeout": RUN_TIMEOUT_SECONDS}))
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", **(at or {})}
        if at:
            environment["ANSIBLE_CALLBACK_PLUGINS"] = str(ROOT / "tests/plugins/callback")
        # The runner as a process of its own: it forks, and this one has threads.
        command = [str(Path(sys.executable).with_name("ansible-runner")), "run", str(folder)]
        command += ["--project-dir", str(ROOT), "--playbook", playbook, "--ident", "run", "--quiet"]
        command += ["--inventory", str(self.folder / "inventory")]
        command += ["--cmdline", shlex.join([*options, "-e", f"@{given}"])]
        subprocess.run(command, env=environment, check=False)
        told = folder / "artifacts/run"
        whole = [path for path in told.glob("job_events/*.json") if not path.stem.endswith("-partial")]
        events = sorted((json.loads(path.read_text()) for path in whole), key=lambda event: event["counter"])
        stats = [each["event_data"] for each in events if each["event"] == "playbook_on_stats"]
        rc = (told / "rc").read_text()
        return Run(
            rc=KILLED if rc == "None" else int(rc),
            changed=sum(count for each in stats for count in each["changed"].values()),
            events=events,
            stdout=(told / "stdout").read_text(),
            folder=folder,
        )

    # --- past Ansible ------------------------------------------------------------------------------------------------
    def execute(self, command: str, stdin: str = "") -> tuple[int, str]:
        channel_in, out, errors = self.ssh.exec_command(command, timeout=300)
        channel_in.write(stdin)
        channel_in.channel.shutdown_write()
        text = out.read().decode() + errors.read().decode()
        return out.channel.recv_exit_status(), text

    def sh(self, command: str, stdin: str = "") -> str:
        code, text = self.execute(command, stdin)
        assert code == 0, f"{command}: exit {code}\n{text}"
        return text

    def script(self, name: str, *arguments: str) -> Any:
        command = shlex.join(["python3", "-", *arguments])
        return json.loads(self.sh(command, (SUPPORT / name).read_text()))

    def read(self, path: str) -> str:
        return self.sh(f"cat {shlex.quote(path)}")

    def differing(self) -> set[str]:
        """Files of SGLang and FlashInfer that are not as their wheels delivered them."""
        told = self.script("differing.py", VENV)
        assert told["seen"] > 1000
        return set(told["differing"])

    def sha256(self, path: str) -> str:
        return self.sh(f"sha256sum {shlex.quote(path)}").split()[0]

    def snapshot(self) -> list[str]:
        """Every watched file with its size, owner, mode and times."""
        form = r"'%p %y %s %U:%G %m %T@ %C@\n'"
        return self.sh(
            f"find {WATCHED} ! -name __pycache__ -printf {form} 2>/dev/null | sort; true"
        ).splitlines()

    def manifest(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.read(f"{STATE}/manifest.json"))
        return told

    def edited(self) -> dict[str, str]:
        """What each file of the manifest is: pristine, open (as planned) or partial."""
        told = {}
        for root, entry in self.manifest()["entries"].items():
            for name, kept in entry["files"].items():
                now = self.sha256(f"{Path(root).parent}/{name}")
                known = {kept["sha256_pristine"]: "pristine", kept["sha256_after"]: "open"}
                told[name] = known.get(now, "partial")
        return told

    def settled(self) -> set[str]:
        """Digests of the edited files for which the kernels were last purged."""
        return {each["digest"] for each in self.manifest()["settled"].values()}

    def active(self, instance: str = "main") -> str:
        return self.sh(f"systemctl is-active sglang-{instance}.service || true").strip()

    def started(self, instance: str = "main") -> str:
        """Changes whenever the unit is started."""
        return self.sh(f"systemctl show -P InvocationID sglang-{instance}.service").strip()

    def request(self, path: str, body: Any = None, key: str = "", port: int = 0) -> tuple[int, str]:
        """(HTTP status, body) of the server, asked on the host by curl's absence: Python."""
        asked = {"url": f"http://127.0.0.1:{port or self.server_port}{path}", "body": body, "key": key}
        told = json.loads(self.sh("python3 -", REQUEST.replace("ASKED", repr(json.dumps(asked)))))
        return told["status"], told["text"]

    def generates(self, key: str = "", port: int = 0) -> int:
        """Tokens that /generate answered, of 4 asked for."""
        body = {"text": "The capital", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        status, text = self.request("/generate", body, key, port)
        assert status == 200, text
        count: int = json.loads(text)["meta_info"]["completion_tokens"]
        return count

    def plant(self) -> str:
        """A compiled kernel in the service user's cache, as far as a purge can tell."""
        marker = "/var/lib/sglang/.cache/flashinfer/0.6.3/120a/cached_ops/trtllm_comm/marker"
        self.sh(
            f"install -D -o sglang -g sglang /dev/null {marker} && chown -R sglang: /var/lib/sglang/.cache"
        )
        return marker

    def exists(self, path: str) -> bool:
        return self.execute(f"test -e {shlex.quote(path)}")[0] == 0


REQUEST = """
import json, urllib.error, urllib.request
asked = json.loads(ASKED)
headers = {"Content-Type": "application/json"}
if asked["key"]:
    headers["Authorization"] = "Bearer " + asked["key"]
data = None if asked["body"] is None else json.dumps(asked["body"]).encode()
request = urllib.request.Request(asked["url"], data, headers)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(json.dumps({"status": answer.status, "text": answer.read().decode()}))
except urllib.error.HTTPError as error:
    print(json.dumps({"status": error.code, "text": error.read().decode()}))
"""
