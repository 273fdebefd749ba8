"""Tell which instances this role deployed here and what each of them runs.

Standard input of python3. Argument: the folder of the instances' records. Prints {instance: record with revision (of
the running process, null when it does not run) and active}.
"""

import json
import subprocess
import sys
from pathlib import Path

found = {}
for path in sorted(Path(sys.argv[1]).glob("*/instance.json")):
    record = json.loads(path.read_text())
    state = subprocess.run(
        ["systemctl", "is-active", record["unit"]], capture_output=True, text=True
    ).stdout.strip()
    running = Path(f"/run/sglang-{path.parent.name}/revision")
    record["active"] = state
    record["revision"] = running.read_text().strip() if state == "active" and running.exists() else None
    found[path.parent.name] = record
print(json.dumps(found))
