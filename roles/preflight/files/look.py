"""Facts for the checks before anything is touched. Standard input of python3; argument: the model's folder."""

import json
import platform
import sys
from pathlib import Path

path = Path(sys.argv[1])
print(
    json.dumps(
        {
            "machine": platform.machine(),
            "systemd": Path("/run/systemd/system").is_dir(),
            # module_utils/sm120/vocabulary.py stands before this; sglang_model says what is wrong with a folder
            "vocab_size": vocabulary_at(sys.argv[1]),  # noqa: F821
            "model_begun": path.is_dir() and any(path.iterdir()),
        }
    )
)
