"""Looks at a CUDA toolkit, or adds (`complete`) or removes (`strip`) what linking needs beside the wheels.

Arguments: look|complete|strip, and a JSON object {method, venv, path, folder, packages, names}. Prints JSON.
"""

import glob
import json
import os
import re
import subprocess
import sys

TOOL_SECONDS = 120  # each answers at once, unless its file system hangs


def site_packages(venv):
    found = glob.glob(os.path.join(venv, "lib", "python3.*", "site-packages"))
    return found[0] if found else ""


def versions(site, names):
    """Installed versions from the folders that pip leaves, without running the venv's Python."""
    found = {}
    for folder in os.listdir(site) if site else []:
        if folder.endswith(".dist-info"):
            name, _, version = folder[: -len(".dist-info")].partition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            if name in names:
                found[name] = version
    return found


def nvcc_version(home):
    try:
        said = subprocess.run(
            [home + "/bin/nvcc", "--version"], stdout=subprocess.PIPE, check=True, timeout=TOOL_SECONDS
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"release (\d+\.\d+)", said)
    return found.group(1) if found else ""


def nvcc_architectures(home):
    """Virtual architectures that it compiles for, such as compute_120; none from one that is too old to tell."""
    try:
        said = subprocess.run(
            [home + "/bin/nvcc", "--list-gpu-arch"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=TOOL_SECONDS,
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return []
    return said.split()


def not_installed(names):
    """{package: ""} of those that dpkg does not have whole."""
    command = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names]
    try:
        said = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TOOL_SECONDS
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        said = ""
    return {name: "" for name in names if name + " installed" not in said.splitlines()}


def wanted_links(home):
    """{link: target} that `-L$CUDA_HOME/lib64 -lX` needs: lib64, and libX.so beside each libX.so.N."""
    links = {home + "/lib64": "lib"}
    for path in sorted(glob.glob(home + "/lib/lib*.so.*")):
        plain = re.sub(r"\.so\..*$", ".so", path)
        links.setdefault(plain, os.path.basename(path))
    return links


def stub(home):
    return home + "/lib/stubs/libcuda.so"


def missing(home):
    absent = [link for link in wanted_links(home) if not os.path.exists(link)]
    return absent + ([] if os.path.exists(stub(home)) else [stub(home)])


def complete(home):
    """Links, and an empty libcuda for the linker: at run time the driver's own is used."""
    added = missing(home)
    for link, target in wanted_links(home).items():
        if link in added:
            if os.path.islink(link):
                os.unlink(link)
            os.symlink(target, link)
    if stub(home) in added:
        os.makedirs(os.path.dirname(stub(home)), exist_ok=True)
        subprocess.run(
            ["c++", "-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", stub(home)],
            check=True,
            timeout=TOOL_SECONDS,
        )
    return added


def strip(home):
    removed = []
    for link in wanted_links(home):
        if os.path.islink(link):
            os.unlink(link)
            removed.append(link)
    if os.path.exists(stub(home)):
        os.unlink(stub(home))
        os.rmdir(os.path.dirname(stub(home)))
        removed.append(stub(home))
    return removed


def main():
    action, asked = sys.argv[1], json.loads(sys.argv[2])
    site = site_packages(asked["venv"])
    if asked["method"] == "pip":
        home = os.path.join(site, "nvidia", asked["folder"]) if site else ""
        found = versions(site, asked["packages"])
        wrong = {n: found.get(n, "") for n, v in asked["packages"].items() if found.get(n) != v}
    else:
        home, wrong = os.path.realpath(asked["path"]), {}
        if asked["method"] == "apt":
            wrong = not_installed(asked["names"])
    there = bool(home) and os.access(home + "/bin/nvcc", os.X_OK)
    changed = []
    if there and asked["method"] == "pip":
        changed = {"look": missing, "complete": complete, "strip": strip}[action](home)
    print(
        json.dumps(
            {
                "venv": bool(site),
                "home": home if there else "",
                "nvcc": nvcc_version(home) if there else "",
                "architectures": nvcc_architectures(home) if there else [],
                "wrong": wrong,
                "links": changed,
                "compiler": any(
                    os.access(os.path.join(p, "c++"), os.X_OK) for p in os.environ.get("PATH", "").split(":")
                ),
            }
        )
    )


main()
