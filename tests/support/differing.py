"""Print, as JSON, every installed file of SGLang and FlashInfer that is not as its wheel's RECORD has it.

Runs with python3 on a host; knows nothing of the project. Argument: the venv.
"""

import base64
import csv
import hashlib
import json
import sys
from pathlib import Path

site = next(Path(sys.argv[1]).glob("lib/python3.*/site-packages"))
differing = {}
seen = 0
for package in ("sglang", "flashinfer_python"):
    record = next(site.glob(f"{package}-*.dist-info/RECORD"))
    with record.open(newline="") as lines:
        for name, wanted, *_ in csv.reader(lines):
            path = site / name
            if not wanted or name.startswith(".."):
                continue
            seen += 1
            data = path.read_bytes() if path.is_file() else b""
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if f"sha256={found}" != wanted:
                differing[name] = found
print(json.dumps({"differing": differing, "seen": seen}))
