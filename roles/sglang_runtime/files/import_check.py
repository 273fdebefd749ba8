"""Import the packages of a release set, each in a process of its own, as a user without rights.

Standard input of the venv's Python, started as root. Arguments: the user to become (nobody where it does not exist
yet), and the modules as JSON. Prints JSON: user, failed {module: last line of what it said}. A kernel package that was
built for another torch fails here ("undefined symbol"), and so does a venv that the server's user may not read.
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORT_SECONDS = 600  # torch from a cold network disk takes minutes

wanted, modules = sys.argv[1], json.loads(sys.argv[2])
try:
    account = pwd.getpwnam(wanted)
except KeyError:
    account = pwd.getpwnam("nobody")
home = tempfile.mkdtemp()  # some of them make folders there on import
os.chown(home, account.pw_uid, account.pw_gid)
environment = {"PATH": os.environ["PATH"], "HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
failed = {}
for module in modules:
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            cwd="/",
            env=environment,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(account.pw_name, account.pw_gid),  # devices may be a group's
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        failed[module] = f"its import had not ended after {IMPORT_SECONDS} s"
        continue
    except OSError as error:  # that user may not even start this Python
        failed[module] = f"{error.strerror}: {error.filename} (in truth {Path(sys.executable).resolve()})"
        continue
    if done.returncode:
        failed[module] = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
shutil.rmtree(home, ignore_errors=True)
print(json.dumps({"user": account.pw_name, "failed": failed}))
