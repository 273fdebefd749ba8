"""Facts for the checks before anything is touched. Standard input of python3; argument: the model's config.json."""

import json
import platform
import sys
from pathlib import Path

path = Path(sys.argv[1])
vocabulary = None
try:
    config = json.loads(path.read_text())
    vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
except (OSError, ValueError):
    pass  # the role sglang_model says what is wrong with a model folder
print(
    json.dumps(
        {
            "machine": platform.machine(),
            "systemd": Path("/run/systemd/system").is_dir(),
            "vocab_size": vocabulary,
            "model_begun": path.parent.is_dir() and any(path.parent.iterdir()),
        }
    )
)
