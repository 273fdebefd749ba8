"""Tell which instances this role deployed here, what each of them runs, and what was decided about it.

Standard input of python3. Arguments: the folder of the instances' records, the folder of verdicts, the folder of
marks of the users that were made here, the fusion probe's report. Prints JSON: deployed {name: record with active,
revision (of the running process, null when none runs)}, verdicts {name: verdict of promote}, users {name: home and
made (by these roles) of each that is marked or runs an instance}, gpus (one line of uuid and driver version each),
silence (what nvidia-smi says instead, where it fails), probe (verdict of the last fusion probe, empty when there is
none; began; stage, cause and text of its failure; gates, packages and gpus that it is about).
"""

import json
import pwd
import shutil
import subprocess
import sys
from pathlib import Path


def ask(*argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        sys.exit(f"Wanted: an answer of {' '.join(argv)}. Found: none in 60 s. Look at: dmesg | tail -50")
    return done.returncode, done.stdout.strip()


deployed = {}
for path in sorted(Path(sys.argv[1]).glob("*/instance.json")):
    name = path.parent.name
    record = json.loads(path.read_text())
    record["active"] = ask("systemctl", "is-active", record["unit"])[1]
    running = Path(f"/run/sglang-{name}/revision")
    record["revision"] = (
        running.read_text().strip() if record["active"] == "active" and running.exists() else None
    )
    deployed[name] = record
verdicts = {path.stem: json.loads(path.read_text()) for path in Path(sys.argv[2]).glob("*.json")}
marks = {path.name for path in Path(sys.argv[3]).glob("*")}
users = {
    account.pw_name: {"home": account.pw_dir, "made": account.pw_name in marks}
    for account in pwd.getpwall()
    if account.pw_name in marks | {record["user"] for record in deployed.values()}
}


def probe(path):
    report = json.loads(path.read_text()) if path.exists() else {}
    failure = report.get("failure") or {}
    packages = report.get("environment", {}).get("packages", {})
    return {
        **{name: report.get(name, "") for name in ("verdict", "began", "gates")},
        **{name: failure.get(name, "") for name in ("stage", "cause", "text")},
        "packages": {name: found["version"] for name, found in packages.items()},
        "gpus": [f"{gpu['uuid']}, {gpu['driver']}" for gpu in report.get("gpus", [])],
    }


gpus, silence = [], ""
if shutil.which("nvidia-smi"):
    code, told = ask("nvidia-smi", "--query-gpu=uuid,driver_version", "--format=csv,noheader")
    gpus, silence = (told.splitlines(), "") if code == 0 else ([], f"exit {code}: {told}")
print(
    json.dumps(
        {
            "deployed": deployed,
            "verdicts": verdicts,
            "users": users,
            "gpus": gpus,
            "silence": silence,
            "probe": probe(Path(sys.argv[4])),
        }
    )
)
