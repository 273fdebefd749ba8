"""NVIDIA's package repository as one deb822 source with its own key, checked before anything is written."""

from __future__ import annotations

import glob
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import own_files
from .apt_sources import Source
from .apt_sources import sources as sources_of
from .apt_state import Run
from .storage import sha256

NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos"
KEYRING = "cuda-keyring_1.1-1_all.deb"
# SHA-256 of NVIDIA's keyring package for each distribution. Pinned alike by
# https://github.com/GoogleCloudPlatform/compute-gpu-installation (cuda_installer/config.py).
KEYRINGS = {
    "ubuntu2204": "d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df",
    "ubuntu2404": "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba",
    "debian12": "e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d",
    "debian13": "dd28f1f6ba0038180d6b23f846cefca1e3de4c9327751665241370bacea452a1",
}
SOURCES = "/etc/apt/sources.list.d/nvidia-sm120.sources"
KEY = "/etc/apt/keyrings/nvidia-sm120"
DEBIAN_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
ONLY_OURS = ["-o", f"Dir::Etc::sourcelist={SOURCES}", "-o", "Dir::Etc::sourceparts=-"]

Fetch = Callable[[str], bytes]


class Refused(Exception):
    """Nothing was left changed: wanted, found, and what to do."""


@dataclass(frozen=True)
class Repository:
    """Where packages and key come from. Empty texts stand for NVIDIA's own of this distribution."""

    url: str = ""
    suite: str = "/"
    components: str = ""
    key_url: str = ""
    key_sha256: str = ""
    contrib_url: str = ""


@dataclass(frozen=True)
class System:
    """The distribution (`debian12`), its codename, and the sources that others gave apt."""

    distribution: str
    codename: str
    sources: tuple[Source, ...] = ()


def parse_os_release(text: str) -> tuple[str, str]:
    """(`ubuntu2404` as NVIDIA spells it, codename)."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    values = {name: value.strip("\"'") for name, value in values.items()}
    version = values.get("VERSION_ID", "").replace(".", "")
    return values.get("ID", "") + version, values.get("VERSION_CODENAME", "")


def examine(root: Path = Path("/")) -> System:
    distribution, codename = parse_os_release((root / "etc/os-release").read_text(encoding="utf-8"))
    theirs = tuple(source for source in sources_of(root) if source.file != SOURCES)
    return System(distribution, codename, theirs)


def resolve(asked: Repository, system: System) -> Repository:
    """With NVIDIA's own addresses where none were given."""
    url = asked.url or (f"{NVIDIA}/{system.distribution}/x86_64" if system.distribution in KEYRINGS else "")
    if not url:
        raise Refused(
            f"Wanted: one of {', '.join(KEYRINGS)}, for which NVIDIA's keyring is known. "
            f"Found: {system.distribution or 'no /etc/os-release'}. "
            "Set nvidia_repository_url, nvidia_repository_key_url and nvidia_repository_key_sha256."
        )
    sha256 = asked.key_sha256 or KEYRINGS.get(system.distribution, "")
    return replace(
        asked,
        url=url.rstrip("/"),
        key_url=asked.key_url or f"{url.rstrip('/')}/{KEYRING}",
        key_sha256=sha256.lower(),
        contrib_url=asked.contrib_url if contrib_missing(system) else "",
    )


def contrib_missing(system: System) -> bool:
    has = any("contrib" in source.components for source in system.sources)
    return system.distribution.startswith("debian") and not has


def configured_by_others(repository: Repository, system: System) -> bool:
    """Whether the host has this very source already. A second one with another key makes apt refuse to work at all."""
    return any(source.uri == repository.url and source.suite == repository.suite for source in system.sources)


def key_path(key: bytes) -> str:
    """apt tells an armoured key from a binary one by the name's ending."""
    return KEY + (".asc" if key.lstrip().startswith(b"-----BEGIN") else ".gpg")


def sources(repository: Repository, signed_by: str, system: System) -> str:
    """The deb822 file. NVIDIA's Debian packages depend on some of the component contrib."""

    def stanza(url: str, suite: str, components: str, key: str) -> str:
        lines = ["Types: deb", f"URIs: {url}", f"Suites: {suite}"]
        lines += [f"Components: {components}"] if components else []
        return "\n".join([*lines, "Architectures: amd64", f"Signed-By: {key}"]) + "\n"

    url = repository.url + ("/" if repository.suite == "/" else "")
    text = "# Written by Ansible (role nvidia_repository).\n"
    text += stanza(url, repository.suite, repository.components, signed_by)
    if repository.contrib_url:
        text += "\n" + stanza(repository.contrib_url, system.codename, "contrib", DEBIAN_KEY)
    return text


def unpack(data: bytes) -> bytes:
    """The key itself: out of a keyring package, or as it is."""
    if not data.startswith(b"!<arch>\n"):
        return data
    with tempfile.TemporaryDirectory() as folder:
        package, tree = Path(folder, "keyring.deb"), Path(folder, "tree")
        package.write_bytes(data)
        try:
            done = subprocess.run(
                ["dpkg-deb", "-x", package, tree], capture_output=True, check=False, timeout=60
            )
        except subprocess.TimeoutExpired:
            raise Refused(
                f"Wanted: dpkg-deb to unpack {package}. Found: no end in 60 s. Look at that disk."
            ) from None
        keys = sorted(tree.glob("usr/share/keyrings/*")) if done.returncode == 0 else []
        if len(keys) != 1:
            raise Refused(
                "Wanted: a package with one file in /usr/share/keyrings. "
                f"Found: {len(keys)}. {done.stderr.decode(errors='replace').strip()}"
            )
        return keys[0].read_bytes()


def fetch_key(repository: Repository, fetch: Fetch) -> bytes:
    url, wanted = repository.key_url, repository.key_sha256
    if not wanted:
        raise Refused(
            f"Wanted: nvidia_repository_key_sha256, the checksum of {url}. Found: none. Set it: sha256sum FILE"
        )
    try:
        data = fetch(url)
    except Exception as error:  # of many kinds: network, TLS, HTTP, file
        raise Refused(
            f"Wanted: the key at {url}. Found: {error}. "
            "Look at network and proxy of this host, or set nvidia_repository_key_url to a mirror or a file:// path."
        ) from error
    found = sha256(data)
    if found != wanted:
        raise Refused(
            f"Wanted: SHA-256 {wanted} of {url}. Found: {found} ({len(data)} bytes). "
            "Trust it only after comparing it with NVIDIA's by another way; then set nvidia_repository_key_sha256."
        )
    return unpack(data)


def update(run: Run) -> None:
    """Fetch this source's list alone, and take any failure for one (apt-get by itself does not)."""
    settings = ("APT::Update::Error-Mode=any", "APT::Get::List-Cleanup=0", "Acquire::Retries=1")
    options = [word for setting in (*settings, "DPkg::Lock::Timeout=600") for word in ("-o", setting)]
    code, said = run(["apt-get", "update", "-q", *ONLY_OURS, *options])
    if code != 0:
        wrong = [line for line in said.splitlines() if line.startswith(("E: ", "W: "))]
        raise Refused(
            f"Wanted: the package lists named in {SOURCES}. Found: {' '.join(wrong)[:600] or said[-400:]}. "
            "Look at the network, or set nvidia_repository_url to a mirror."
        )


def kept_key(record: own_files.Record | None, key_sha256: str) -> dict[str, bytes]:
    """{path: key} of the key that is there, as it was written from a download with this checksum."""
    if record is None or (record.extra or {}).get("key_sha256") != key_sha256:
        return {}
    there = {path: Path(path) for path in record.files if path.startswith(KEY)}
    keys = {path: file.read_bytes() for path, file in there.items() if file.is_file()}
    return {path: key for path, key in keys.items() if sha256(key) == record.files[path]}


@dataclass(frozen=True)
class Host:
    """What the steps below touch; tests put something else there."""

    run: Run
    fetch: Fetch
    system: System
    record: Path


def present(host: Host, asked: Repository, user: str, check: bool) -> own_files.Change:
    """Have the source, for one more user; on failure put everything back."""
    record = own_files.load(host.record)
    users = list(dict.fromkeys([*((record.extra or {}).get("users", []) if record else []), user]))
    repository = resolve(asked, host.system)
    if configured_by_others(repository, host.system):
        if record is not None and not check:
            own_files.take_away(record, host.record)
        return own_files.Change({}, (), own_files.Record({}), record is not None, {})
    extra = {"users": users, "key_sha256": repository.key_sha256}
    files = kept_key(record, repository.key_sha256)
    if not files and check:
        files = {KEY + ".gpg": b""}
    elif not files:
        key = fetch_key(repository, host.fetch)
        files = {key_path(key): key}
    files[SOURCES] = sources(repository, next(iter(files)), host.system).encode()
    change = own_files.plan(files, record, extra)
    if change.changed and not check:
        own_files.apply(change, host.record)
        if change.write:
            try:
                update(host.run)
            except Refused:
                _put_back(host, change, record)
                raise
    return change


def _put_back(host: Host, change: own_files.Change, record: own_files.Record | None) -> None:
    if record is None:
        drop_lists(host.run)
        own_files.take_away(change.record, host.record)
        return
    back = {path: change.before[path] for path in record.files if path in change.before}
    own_files.apply(own_files.plan(back, change.record, record.extra), host.record)


def absent(host: Host, user: str, check: bool) -> bool:
    """One user less; the last one takes the source along. Whether anything changes."""
    record = own_files.load(host.record)
    users = (record.extra or {}).get("users", []) if record else []
    if record is None or (user not in users and users):
        return False
    left = [each for each in users if each != user]
    if check:
        return True
    if left:
        own_files.apply(
            own_files.Change({}, (), replace(record, extra={**record.extra, "users": left}), True, {}),
            host.record,
        )
    else:
        drop_lists(host.run)
        own_files.take_away(record, host.record)
    return True


def drop_lists(run: Run) -> None:
    """Forget what the source offers, or apt goes on offering it until its next update."""
    code, text = run(["apt-get", "indextargets", *ONLY_OURS, "--format", "$(FILENAME)"])
    for name in text.split() if code == 0 else []:
        stem = name.rpartition("_")[0]
        for path in Path(stem).parent.glob(f"{glob.escape(Path(stem).name)}_*"):
            path.unlink(missing_ok=True)
