"""Print, as JSON, every file of every distribution in a venv that is missing or not as its RECORD has it.

Runs with python3 on a host; knows nothing of the project. Argument: the venv.
"""

import base64
import csv
import hashlib
import json
import sys
from pathlib import Path

site = next(Path(sys.argv[1]).glob("lib/python3.*/site-packages"))
wrong, seen = [], 0
for record in site.glob("*.dist-info/RECORD"):
    with record.open(newline="") as lines:
        for name, wanted, *_ in csv.reader(lines):
            path = site / name
            if wanted:
                seen += 1
                data = path.read_bytes() if path.is_file() else b""
                found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                if wanted != f"sha256={found}":
                    wrong.append(f"{record.parent.name}: {name}")
print(json.dumps({"wrong": wrong, "seen": seen}))
