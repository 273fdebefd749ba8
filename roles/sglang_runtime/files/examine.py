"""Tell what a venv holds against what is wanted, without starting the venv's Python.

Standard input of python3: no file is left on the target. Arguments: venv, {distribution: version} as JSON.
Prints JSON: python (the version of the venv's interpreter, or of this one where there is no venv), interpreter (major
and minor of this one), venv_module (it can make a venv), headers (it has them), exists, site_packages, versions (all
that is installed), wrong ({distribution: found or null} for what is not as wanted), proved (digest of the release set
whose imports were seen to work here), free_mib.
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


venv, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
folders = sorted(venv.glob("lib/python3.*/site-packages"))
versions = {
    normal(found.name): found.version
    for found in importlib.metadata.distributions(path=[str(folder) for folder in folders])
    if found.name
}
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
            "site_packages": str(folders[-1]) if folders else None,
            "versions": versions,
            "wrong": wrong,
            "proved": proof.read_text().strip() if proof.exists() else "",
            "free_mib": shutil.disk_usage(existing).free // 2**20,
        }
    )
)
