"""Let the installed SGLang parse argument files, without loading a model or touching a GPU.

Arguments: the YAML files. Exit 0, or one sentence and exit 1: an argument that this SGLang does not know.
"""

import argparse
import gc
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

# On import torch makes a folder for what it will compile, by default one that stays in /tmp.
compiled = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name

gc.disable()  # a sixth of the time of importing all of SGLang

from sglang.srt import server_args  # noqa: E402


def refuse(_parser, message):
    sys.exit(
        f"Wanted: arguments that SGLang {importlib.metadata.version('sglang')} knows. Found: {message}. "
        "Correct sglang_server_extra_arguments or the variable of that argument."
    )


argparse.ArgumentParser.error = refuse  # without hundreds of lines of usage

# Parsing is what is asked for; the checks that ServerArgs makes next look at GPUs and at the model.
server_args.ServerArgs.from_cli_args = staticmethod(lambda parsed: parsed)

for file in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / "arguments.yaml"  # SGLang insists on the ending
        named.symlink_to(Path(file).resolve())
        try:
            server_args.prepare_server_args(["--config", str(named)])
        except ValueError as error:
            refuse(None, error)
