#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Bring a model's files from a hub's repository at one commit, each proved by its hash."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_model_hub
short_description: Bring a model's files from a hub, each proved by its hash
description:
  - With O(action=plan), tells which files of a repository at one commit the folder lacks, and refuses a disk that is
    too small.
  - With O(action=fetch), brings O(files) and proves each by size and SHA-256 (or Git's hash, which is what the hub
    tells of small files). What was cut off is continued. A file that is there already is only proved.
  - Needs the package C(huggingface_hub) where it runs, unless everything is there or O(source_folder) has it.
options:
  action:
    description: What to do.
    type: str
    choices: [plan, fetch]
    default: plan
  repository:
    description: The repository, as C(owner/name).
    type: str
    required: true
  revision:
    description: The commit, 40 hexadecimal digits. A branch or a tag is refused, because it moves.
    type: str
    required: true
  path:
    description: The model folder.
    type: path
    required: true
  endpoint:
    description: Address of the hub or of a mirror of it.
    type: str
    default: https://huggingface.co
  token_file:
    description: A file of mode 0600 with the hub's token, for private and gated repositories. Never returned.
    type: path
  source_folder:
    description: A folder that another host filled by this module; files are copied from it, and the hub is not asked.
    type: path
  exclude:
    description: Patterns of files to leave out.
    type: list
    elements: str
    default: []
  at_a_time:
    description: How many files one portion has.
    type: int
    default: 8
  files:
    description: The files to bring.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    details: O(action=plan) never changes anything; O(action=fetch) tells what it would bring.
  diff_mode:
    support: none
    details: The files are the model's.
author:
  - sglang-sm120 contributors
"""

EXAMPLES = r"""
- name: See what is missing
  sglang_model_hub:
    repository: lukealonso/GLM-5-NVFP4
    revision: 0123456789abcdef0123456789abcdef01234567
    path: /srv/models/glm5
  register: plan

- name: Bring the first portion
  sglang_model_hub:
    action: fetch
    repository: lukealonso/GLM-5-NVFP4
    revision: 0123456789abcdef0123456789abcdef01234567
    path: /srv/models/glm5
    files: "{{ plan.batches[0].files }}"
"""

RETURN = r"""
missing:
  description: Files that are not there, or not proved.
  returned: always
  type: list
  elements: str
batches:
  description: The missing files in portions, each with C(files) and a C(label) that tells how far it leads.
  returned: with O(action=plan)
  type: list
  elements: dict
total_bytes:
  description: Size of all files.
  returned: always
  type: int
missing_bytes:
  description: What has to be written.
  returned: always
  type: int
"""

import logging
import os
import shutil
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import model_files
from ansible.module_utils.sm120.model_files import HubFile, Mark, ModelError
from ansible.module_utils.sm120.redact import redact

CLIENT_PACKAGES = ("huggingface_hub", "httpx", "httpcore", "requests")
NETWORK = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
RESERVE_BYTES = 2**30  # left free beside the model


class Hub:
    """The hub, by its own client, which is loaded and told the token when it is first asked."""

    def __init__(self, given: dict[str, Any], folder: Path) -> None:
        self.given, self.folder = given, folder
        self.lock = Lock()  # transfers run side by side

    @cached_property
    def token(self) -> Any:
        """The token, or no: never the one that this account is logged in with."""
        return model_files.read_token(self.given["token_file"]) if self.given["token_file"] else False

    @cached_property
    def client(self) -> Any:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_"))]:
            del os.environ[name]  # what the account on this host has set is not what was asked for
        os.environ |= {
            "HF_HOME": str(self.folder / model_files.PARTIALS),
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        }
        try:
            import huggingface_hub.file_download
        except ImportError as error:
            raise ModelError(
                f"Wanted: the package huggingface_hub in the runtime's venv. Found: {error}. "
                "Run the runtime first (playbooks/runtime.yml)."
            ) from None
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        return huggingface_hub

    def files(self) -> list[HubFile]:
        """Every file of the repository at the commit."""
        token = self.token  # first: a bad file is told before the hub is asked
        api = self.client.HfApi(endpoint=self.given["endpoint"], token=token)
        told = api.model_info(
            self.given["repository"], revision=self.given["revision"], files_metadata=True, timeout=60
        )
        if told.sha != self.given["revision"]:
            raise ModelError(
                f"Wanted: commit {self.given['revision']} of {self.given['repository']}. Found: {told.sha}."
            )
        return [
            HubFile(each.rfilename, each.lfs.size, each.lfs.sha256, "sha256")
            if each.lfs
            else HubFile(each.rfilename, each.size or 0, each.blob_id or "", "git")
            for each in told.siblings or []
        ]

    def bring(self, wanted: HubFile, partial: Path) -> None:
        """By the client's own transfer; its hf_hub_download forgets, from release 1 on, what it had when cut off."""
        with self.lock:
            client, token = self.client, self.token
        held = partial.stat().st_size if partial.exists() else 0
        url = client.hf_hub_url(
            self.given["repository"],
            wanted.path,
            revision=self.given["revision"],
            endpoint=self.given["endpoint"],
        )
        with partial.open("ab") as content:
            client.file_download.http_get(
                url,
                content,
                resume_size=held,
                headers=client.utils.build_hf_headers(token=token),
                expected_size=wanted.size,
            )

    def explained(self, error: Exception) -> ModelError:
        """An error of the client as one message."""
        names = {each.__name__ for each in type(error).__mro__}
        given, asked = self.given, f"{self.given['repository']} at {self.given['revision']}"
        if names & {"GatedRepoError", "RepositoryNotFoundError"}:
            found = (
                "the hub says that its conditions have to be accepted first"
                if "GatedRepoError" in names
                else "the hub says that there is none, or none for this token"
                if self.token
                else "the hub says that there is none for readers without a token"
            )
            return ModelError(
                f"Wanted: {asked} from {given['endpoint']}. Found: {found}. Check sglang_model_repository, or put a "
                "token that may read it into a file of mode 0600 on this host and name it in sglang_model_token_file."
            )
        if "RevisionNotFoundError" in names:
            return ModelError(
                f"Wanted: {asked} from {given['endpoint']}. Found: no such commit. Check sglang_model_revision."
            )
        said = " ".join(redact(str(error), [self.token or None]).split())[:500]
        return ModelError(
            f"Wanted: {asked} from {given['endpoint']}. Found: {type(error).__name__}: {said}. What was downloaded is "
            "kept: run this again, or set sglang_model_endpoint to a mirror that this host can reach."
        )


def known(given: dict[str, Any], folder: Path, hub: Hub) -> Mark:
    """The folder's mark; a new one from the folder to copy from, or from the hub."""
    identity = given["repository"], given["revision"]
    mark = model_files.load(folder, *identity)
    if mark is not None:
        return mark
    if given["source_folder"]:
        source = model_files.load(Path(given["source_folder"]), *identity)
        if source is None:
            raise ModelError(
                f"Wanted: {identity[0]} at {identity[1]} in {given['source_folder']}, brought there by this role "
                f"(with its {model_files.MARK}). Found: none. Copy the whole folder of a host that has it."
            )
        return Mark(*identity, source.files, {})
    return Mark(*identity, hub.files(), {})


def refuse_full_disk(folder: Path, needed: int) -> None:
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    if needed and free < needed + RESERVE_BYTES:
        raise ModelError(
            f"Wanted: {model_files.readable(needed + RESERVE_BYTES)} free at {folder} for what the model lacks. "
            f"Found: {model_files.readable(free)}. Nothing was downloaded. Make room there, or set "
            "sglang_model_path to a path on a larger disk."
        )


def fetch_one(given: dict[str, Any], folder: Path, hub: Hub, wanted: HubFile) -> None:
    """Bring one file, unless it lies there already; it gets its name when it is proved."""
    target, partial = folder / wanted.path, model_files.partial(folder, wanted)
    if not model_files.found_instead(target, wanted):
        return
    for each in (target, partial):
        each.parent.mkdir(parents=True, exist_ok=True)
    if given["source_folder"]:
        shutil.copyfile(Path(given["source_folder"]) / wanted.path, partial)
    else:
        if partial.exists() and partial.stat().st_size > wanted.size:
            partial.unlink()
        hub.bring(wanted, partial)
    found = model_files.found_instead(partial, wanted)
    if found:
        partial.unlink()
        raise ModelError(
            f"Wanted: {wanted.path} of {wanted.size} bytes with {wanted.kind} hash {wanted.hash}. Found: {found}; "
            "it was thrown away. Run this again; if it happens again, "
            f"{given['source_folder'] or given['endpoint']} has another file."
        )
    partial.chmod(0o644)
    partial.replace(target)


def fetch(given: dict[str, Any], folder: Path, hub: Hub, mark: Mark, todo: list[HubFile]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in model_files.listed_before(folder) - {each.path for each in mark.files}:
        (folder / name).unlink(missing_ok=True)  # of another commit: a server might load it
    model_files.store(folder, mark)
    failed: Exception | None = None
    with ThreadPoolExecutor(max_workers=len(todo)) as pool:
        for wanted, done in [(each, pool.submit(fetch_one, given, folder, hub, each)) for each in todo]:
            try:
                done.result()
            except Exception as error:
                failed = failed or error
            else:
                mark.proved[wanted.path] = model_files.state(folder / wanted.path) or []
    model_files.store(folder, mark)
    if failed is not None:
        raise failed


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["plan", "fetch"], "default": "plan"},
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token_file": {"type": "path", "no_log": False},  # the path is no secret
            "source_folder": {"type": "path"},
            "exclude": {"type": "list", "elements": "str", "default": []},
            "at_a_time": {"type": "int", "default": 8},
            "files": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params
    folder = Path(given["path"])
    hub = Hub(given, folder)
    os.umask(0o022)
    try:
        if not model_files.COMMIT.fullmatch(given["revision"]):
            raise ModelError(
                f"Wanted: revision as a commit of 40 hexadecimal digits. Found: {given['revision']!r}. "
                "A branch or tag moves."
            )
        mark = known(given, folder, hub)
        wanted = model_files.listed(mark.files, given["exclude"])
        todo = model_files.missing(folder, mark, wanted)
        if given["action"] == "plan":
            refuse_full_disk(folder, model_files.bytes_to_come(folder, todo))
        else:
            todo = [each for each in todo if each.path in given["files"]]
            if todo and not module.check_mode:
                fetch(given, folder, hub, mark, todo)
        left = model_files.missing(folder, mark, wanted)
        if given["action"] == "fetch" and not left and not module.check_mode:
            shutil.rmtree(folder / model_files.PARTIALS, ignore_errors=True)
    except ModelError as error:
        module.fail_json(msg=str(error))
    except Exception as error:
        of_client = type(error).__module__.split(".")[0] in CLIENT_PACKAGES
        if of_client or isinstance(error, NETWORK):
            module.fail_json(msg=str(hub.explained(error)))
        if not isinstance(error, OSError):
            raise
        module.fail_json(
            msg=f"Wanted: to read and write below {folder}. Found: {error}. Look at that disk, its room and who may "
            "write there; what was downloaded is kept: run this again."
        )
    module.exit_json(
        changed=given["action"] == "fetch" and bool(todo),
        missing=[each.path for each in left],
        batches=model_files.batches(todo, max(given["at_a_time"], 1)) if given["action"] == "plan" else [],
        total_bytes=sum(each.size for each in wanted),
        missing_bytes=model_files.bytes_to_come(folder, left),
    )


if __name__ == "__main__":
    main()
