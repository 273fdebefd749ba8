"""Make a model folder with a config and a tokenizer of its own and no weights: SGLang fills it with random ones.

Standard input of the venv's python. Arguments: folder, config as JSON (a Hugging Face config.json that names
architectures, model_type and vocab_size). The tokenizer is a byte-level BPE whose merges are trained on made-up
syllables, so that any text encodes and the vocabulary has exactly vocab_size entries.
"""

import itertools
import json
import os
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
vocabulary = config["vocab_size"]

chance = random.Random(120)
syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
words = sorted({"".join(chance.choices(syllables, k=chance.randint(1, 5))) for _ in range(3 * vocabulary)})

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=vocabulary,
    min_frequency=1,
    show_progress=False,
    special_tokens=list(SPECIAL.values()),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
tokenizer.train_from_iterator((" ".join(chance.choices(words, k=30)) for _ in range(vocabulary)), trainer)
if tokenizer.get_vocab_size() != vocabulary:
    sys.exit(f"wanted a vocabulary of {vocabulary} tokens, training gave {tokenizer.get_vocab_size()}")

ids = {name.replace("_token", "_token_id"): tokenizer.token_to_id(text) for name, text in SPECIAL.items()}
files = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **SPECIAL,
    },
    "special_tokens_map.json": SPECIAL,
    "generation_config.json": ids,
    "config.json": {**config, **ids},  # last: its presence says that the folder is complete
}
os.umask(0o022)
folder.mkdir(parents=True, exist_ok=True)
tokenizer.save(str(folder / "tokenizer.json"))
for name, content in files.items():
    partial = folder / f".{name}.partial"
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.rename(folder / name)
