"""Stop units and wait until their processes hold no GPU memory.

Standard input of python3. Arguments: the units as JSON, stop or look (stop nothing). Prints the units that were running
as JSON. Ends with exit 1 and a sentence when one cannot be stopped or its processes still hold GPU memory afterwards.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

GPU_RELEASE_SECONDS = 60
ANSWER_SECONDS = 60


def said(*argv):
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    asked = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **quiet)
    try:
        return asked.communicate(timeout=ANSWER_SECONDS)[0].strip()
    except subprocess.TimeoutExpired:
        # Not waited for: what hangs in the driver, as on a card that fell off the bus, does not end by being killed.
        asked.kill()
        sys.exit(
            f"Wanted: an answer of {' '.join(argv)}. Found: none in {ANSWER_SECONDS} s. Look at: dmesg | tail -50"
        )


def systemctl(*arguments):
    return said("systemctl", *arguments)


def processes(unit):
    """The process ids in the unit's control group."""
    group = systemctl("show", "-P", "ControlGroup", unit)
    roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
    files = [path for root in roots if group for path in Path(root + group).glob("**/cgroup.procs")]
    return {int(line) for path in files for line in path.read_text().split()}


def on_gpu():
    """The process ids that nvidia-smi sees computing; none where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return set()
    answer = said("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
    return {int(line) for line in answer.split() if line.isdigit()}


units, action = json.loads(sys.argv[1]), sys.argv[2]
running = [unit for unit in units if systemctl("is-active", unit) not in ("inactive", "failed")]
if action == "look":
    print(json.dumps(running))
    sys.exit()
ours = set().union(*(processes(unit) for unit in running))
if running:
    # Returns when they have ended: systemd keeps to each unit's own TimeoutStopSec and kills what is left.
    done = subprocess.run(["systemctl", "stop", *running], capture_output=True, text=True)
    if done.returncode:
        found = done.stderr.strip().rstrip(".") or f"exit {done.returncode}"
        sys.exit(
            f"Wanted: {', '.join(running)} stopped. Found: {found}. "
            f"Look at: systemctl status {' '.join(running)}; then run this again"
        )
# SGLang answers SIGTERM by killing its own process tree, which systemd takes for a failure. Of no unit it would be all.
if units:
    systemctl("reset-failed", *units)
end = time.monotonic() + GPU_RELEASE_SECONDS
while held := ours & on_gpu():
    if time.monotonic() > end:
        sys.exit(
            f"Wanted: GPU memory free after stopping {', '.join(running)}. Found: processes {sorted(held)} still "
            f"hold it after {GPU_RELEASE_SECONDS} s. Look at: nvidia-smi; dmesg | grep -i xid"
        )
    time.sleep(1)
print(json.dumps(running))
