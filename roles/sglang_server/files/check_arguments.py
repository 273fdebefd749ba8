"""Let the installed SGLang parse an argument file, without loading a model or touching a GPU.

Argument: the YAML file. Exit 0, or argparse's message and exit 2: an argument that this SGLang does not know.
"""

import sys
import tempfile
from pathlib import Path

from sglang.srt import server_args

# Parsing is what is asked for; the checks that ServerArgs makes next look at GPUs and at the model.
server_args.ServerArgs.from_cli_args = staticmethod(lambda parsed: parsed)

with tempfile.TemporaryDirectory() as folder:
    named = Path(folder) / "arguments.yaml"  # SGLang insists on the ending
    named.symlink_to(Path(sys.argv[1]).resolve())
    try:
        server_args.prepare_server_args(["--config", str(named)])
    except ValueError as error:
        sys.exit(f"{error}")
