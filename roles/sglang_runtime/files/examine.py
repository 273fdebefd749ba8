"""Tell what a venv holds against what is wanted, without starting the venv's Python.

Standard input of python3: no file is left on the target. Arguments: venv, {distribution: version} as JSON, and as JSON
{pattern of names that another release set brings: distribution whose version such a package may have and stay, or ""}.
Prints JSON: python (the version of the venv's interpreter, or of this one where there is no venv), interpreter (major
and minor of this one), venv_module (it can make a venv), headers (it has them), exists, site_packages, versions (all
that is installed), wrong ({distribution: found or null} for what is not as wanted), leaving (what another release set
brought and this one does not, with whatever shares a file with it: uninstalling one takes that file from both), foreign
(there is something, and without the mark of the role, its release.txt), proved
(digest of the release set whose imports were seen to work here), free_mib.
"""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
import sysconfig
from pathlib import Path


def normal(name: str) -> str:
    """The normalised name of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


venv, wanted, swapped = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
folders = sorted(venv.glob("lib/python3.*/site-packages"))
installed = {
    normal(found.name): found
    for found in importlib.metadata.distributions(path=[str(folder) for folder in folders])
    if found.name
}
versions = {name: found.version for name, found in installed.items()}
pinned = {normal(name): version for name, version in wanted.items()}


def leaves(name: str) -> bool:
    """Whether a package that is not of this release set goes."""
    for pattern, companion in swapped.items():
        if re.fullmatch(pattern, name):
            return not companion or versions[name].partition("+")[0] != pinned[companion]
    return False


def files(name: str) -> set[str]:
    return {str(path) for path in installed[name].files or ()}


gone = {name for name in versions if name not in pinned and leaves(name)}
theirs = set().union(*map(files, gone))
leaving = sorted(gone | {name for name in versions if theirs and not theirs.isdisjoint(files(name))})
config = venv / "pyvenv.cfg"
made_with = (
    re.search(r"^version\s*=\s*([\d.]+)", config.read_text(), re.MULTILINE) if config.exists() else None
)
proof = venv / "proved.txt"
existing = next(folder for folder in (venv, *venv.parents) if folder.is_dir())
wrong = {name: versions.get(normal(name)) for name in wanted if versions.get(normal(name)) != wanted[name]}
print(
    json.dumps(
        {
            "python": made_with[1] if made_with else ".".join(map(str, sys.version_info[:3])),
            "interpreter": "{}.{}".format(*sys.version_info[:2]),
            "headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
            "venv_module": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
            "exists": (venv / "bin/python").exists(),
            "foreign": venv.is_dir() and any(venv.iterdir()) and not (venv / "release.txt").is_file(),
            "site_packages": str(folders[-1]) if folders else None,
            "versions": versions,
            "wrong": wrong,
            "leaving": leaving,
            "proved": proof.read_text().strip() if proof.exists() else "",
            "free_mib": shutil.disk_usage(existing).free // 2**20,
        }
    )
)
